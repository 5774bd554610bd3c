"""The check for unsafe code finds it."""

from __future__ import annotations

import pytest

from tests.unsafe import unsafe

UNSAFE = [
    "import pickle",
    "import pickle as json",
    "from pickle import loads",
    "from pickle import loads as parse",
    "import pickle\npickle.load(file)",
    "import pickle\nread = pickle.loads",
    "def f():\n    import cloudpickle",
    "from joblib import load",
    "import marshal, json",
    "import shelve",
    "import multiprocessing.connection",
    "from concurrent.futures import ProcessPoolExecutor",
    "class Mine(pickle.Unpickler): pass",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=True)",
    "from torch import load",
    "frame = pandas.read_pickle(path)",
    "np.load(path, allow_pickle=True)",
    "np.load(path, allow_pickle=wanted)",
    "eval(text)",
    "run = exec",
    "import builtins\nbuiltins.eval(text)",
    "__import__(name)",
    "subprocess.run(line, shell=True)",
    "subprocess.Popen(line, shell=wanted)",
    "os.system(line)",
    "from os import popen",
    "await_ = asyncio.create_subprocess_shell(line)",
]
SAFE = [
    "import json\njson.loads(text)",
    "np.load(path)",
    "np.load(path, allow_pickle=False)",
    "subprocess.run([name], shell=False)",
    "import re\nre.compile(text)",
    "text = 'pickle.loads and eval are words'",
    "connection.executemany(line)",
    "self.load(rows)",
]


@pytest.mark.parametrize("source", UNSAFE)
def test_it_is_found(source: str) -> None:
    assert unsafe(source)


@pytest.mark.parametrize("source", SAFE)
def test_what_only_looks_so_is_left(source: str) -> None:
    assert unsafe(source) == []


def test_a_module_that_may_pickle_may_not_unpickle() -> None:
    allowed = {"pickle", "pickle.dumps"}
    assert unsafe("import pickle\npickle.dumps(value)", allowed) == []
    for more in ("pickle.loads(data)", "pickle.load(file)", "pickle.Unpickler(file)", "eval(x)"):
        assert unsafe(f"import pickle\n{more}", allowed)
