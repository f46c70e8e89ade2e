"""Reading a vLLM's source: compared with what Python itself says of the installed one."""

import importlib
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import vllm

from dev.hooks.check import Hook, hooks
from dev.hooks.source import Source
from vllm_kvevict.serving.admission import _API_SERVER

INSTALLED = Source(Path(vllm.__file__).parent)

PACKAGE = {
    "__init__.py": "",
    "base.py": """
class Base:
    field: int = 0
    plain = 1
    def __init__(self):
        if True:
            self.late, self.later = 1, 2
            with open('x'):
                self.deep: int = 3
    def method(self, first, *, second=None): ...
    async def anything(self, **options): ...
def function(a, b=1): ...
try:
    GUARDED = 1
except ImportError:
    FALLBACK = None
""",
    "sub/__init__.py": "from ..base import Base as Parent\nfrom vllm.base import *\n",
    "sub/child.py": """
from . import Parent
from torch import Tensor
class Child(Parent[int]):
    @property
    def own(self): ...
""",
}


@pytest.fixture
def source(tmp_path) -> Source:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Source(tmp_path)


@pytest.mark.parametrize(
    "module, name, parameters",
    [
        ("vllm.base", "Base.field", ()),
        ("vllm.base", "Base.plain", ()),
        ("vllm.base", "Base.late", ()),
        ("vllm.base", "Base.later", ()),
        ("vllm.base", "Base.deep", ()),
        ("vllm.base", "Base.method", ("first", "second")),
        ("vllm.base", "Base.anything", ("whatever",)),
        ("vllm.base", "function", ("b",)),
        ("vllm.base", "GUARDED", ()),
        ("vllm.base", "FALLBACK", ()),
        ("vllm.sub", "Parent.method", ("second",)),
        ("vllm.sub", "function", ("a",)),
        ("vllm.sub.child", "Child.own", ()),
        ("vllm.sub.child", "Child.late", ()),
        ("vllm.sub.child", "Child.method", ("first",)),
        ("vllm.sub.child", "Tensor", ()),
    ],
)
def test_finds(source, module, name, parameters):
    assert source.has(module, name, parameters)


@pytest.mark.parametrize(
    "module, name, parameters",
    [
        ("vllm.gone", "Base", ()),
        ("vllm.base", "Gone", ()),
        ("vllm.base", "Base.gone", ()),
        ("vllm.base", "Base.first", ()),
        ("vllm.base", "Base.method", ("third",)),
        ("vllm.base", "Base.field", ("first",)),
        ("vllm.base", "function.a", ()),
        ("vllm.sub", "Gone", ()),
        ("vllm.sub.child", "Child.gone", ()),
    ],
)
def test_misses(source, module, name, parameters):
    assert not source.has(module, name, parameters)


def imported(module: str) -> ModuleType:
    """Of a package that does not serve this platform, the module that it had imported before."""
    try:
        return importlib.import_module(module)
    except ImportError:
        if module not in sys.modules:
            raise
        return sys.modules[module]


@cache
def text_of(owner: type) -> str:
    """The source of a class and its bases. Python parses the whole file to find a class in it."""
    return "".join(inspect.getsource(base) for base in owner.__mro__[:-1])


@pytest.mark.parametrize("hook", [h for h in hooks() if h.applies(vllm.__version__)], ids=str)
def test_agrees_with_python(hook: Hook):
    """Members that only instances have are no attributes of the class; all others must be."""
    assert INSTALLED.has(hook.module, hook.name, hook.parameters)
    if hook.module == _API_SERVER:
        # Whoever has imported it counts as an API server from then on.
        return
    found = imported(hook.module)
    for name in hook.name.split("."):
        owner, found = found, getattr(found, name, None)
        if found is None and inspect.isclass(owner):
            assert not hook.parameters
            fields = getattr(owner, "__dataclass_fields__", getattr(owner, "__annotations__", {}))
            text = text_of(owner)
            assert name in fields or f"self.{name}" in text or f"    {name}:" in text
            return
    assert found is not None or hook.name.split(".")[-1] in dir(owner)
    for parameter in hook.parameters:
        signature = inspect.signature(found)
        kinds = {p.kind for p in signature.parameters.values()}
        assert parameter in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds
