"""Model servers that keep their blocks in kvstore: thin layers over the client.

Standard library, numpy and the model server itself only: they run inside its process.
"""
