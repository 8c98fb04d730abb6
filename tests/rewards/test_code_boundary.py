"""What crosses between the tests and a solution, which run in two processes: these would all pass in one."""

import shutil

import pytest

from groupax.rewards.code import code_tests

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

# What -> a solution, and tests that it passes.
CROSSES = {
    "plain values": """
def f(x):
    return x
# tests
for v in [0, 1, -1, 2 ** 63, 2 ** 64, -2 ** 100, 10 ** 6000, 1.5, -0.0, 1e+308, float('inf'), 1j,
    'é\\ud800\\x00', b'\\x00\\xff', None, True, (1, (2,)), [1, [2]], {1: 2, 'a': [1]}, {1, 2},
    frozenset({3}), range(3), bytearray(b'x')]:
    r = f(v)
    assert r == v and type(r) is type(v), v
import math
assert math.isnan(f(float('nan'))) and math.copysign(1, f(-0.0)) == -1
""",
    "values of the standard library": """
def f(x): return x
# tests
import datetime as d, decimal, fractions, collections as c, pickle
for v in [d.date(2020, 1, 2), d.datetime(2020, 1, 2, 3, 4, 5, 6), d.timedelta(3, 4, 5), d.time(1, 2),
    decimal.Decimal('1.50'), fractions.Fraction(1, 3), c.Counter('aab'), c.OrderedDict(a=1),
    c.defaultdict(list, {1: [2]}), c.deque([1, 2])]:
    r = f(v)
    assert r == v and type(r) is type(v) and pickle.loads(pickle.dumps(r)) == v, v
""",
    "classes that extend containers": """
class Stack(list):
    def top(self): return self[-1]
def made(): return Stack([1])
# tests
s = Stack([1, 2])
assert s.top() == 2 and list(s) == [1, 2] and made() == [1] and isinstance(made(), list)
""",
    "a list, a dict, a set and bytes that are changed": """
def f(d, s, b, x):
    x.sort()
    d['k'] = [1]
    s.add(4)
    del d['a']
    b.extend(b'xy')
# tests
d = {'a': 1}
s = {1}
b = bytearray(b'z')
x = [3, 1, 2]
f(d, s, b=b, x=x)
assert d == {'k': [1]} and s == {1, 4} and (b == b'zxy') and x == [1, 2, 3]
""",
    "exceptions, own ones too": """
class E(ValueError):
    def __init__(self, c):
        super().__init__('bad')
        self.code = c
def f(x):
    if x == 0: raise KeyError('k')
    if x == 1: raise E(5)
    1 / 0
# tests
try:
    f(0)
    assert False
except KeyError as e: assert e.args == ('k',)
try:
    f(1)
    assert False
except E as e: assert str(e) == 'bad' and isinstance(e, ValueError)
try:
    f(2)
    assert False
except ZeroDivisionError as e: assert 'division' in str(e)
assert issubclass(E, ValueError)
""",
    "types as arguments": """
def f(g, operation): return [g(x) for x in operation]
# tests
assert f(int, operation=['1']) == [1]
""",
    "generators and iterators, both ways": """
def g(n):
    for i in range(n): yield i
def take(it): return list(it)
def inf():
    i = 0
    while 1:
        yield i
        i += 1
# tests
assert list(g(3)) == [0, 1, 2]
it = g(2)
assert next(it) == 0 and next(it) == 1
try:
    next(it)
    assert False
except StopIteration: pass
assert take((x for x in [1, 2])) == [1, 2]
assert take(iter([1])) == [1]
assert take(map(str, [1])) == ['1']
import itertools
assert list(itertools.islice(inf(), 3)) == [0, 1, 2]
assert sum(g(4)) == 6 and sorted(g(2)) == [0, 1] and (2 in g(3))
""",
    "a class": """
class Stack:
    def __init__(self, it=()): self.i = list(it)
    def push(self, x):
        self.i.append(x)
        return self
    def pop(self): return self.i.pop()
    def __len__(self): return len(self.i)
    def __contains__(self, x): return x in self.i
    def __getitem__(self, k): return self.i[k]
    def __setitem__(self, k, v): self.i[k] = v
    def __iter__(self): return iter(self.i)
    def __str__(self): return 'S'
    def __bool__(self): return bool(self.i)
    @property
    def top(self): return self.i[-1]
    @classmethod
    def make(cls, *a): return cls(a)
# tests
s = Stack()
assert not s
s.push(1).push(2)
assert len(s) == 2 and s.pop() == 2 and (1 in s) and (5 not in s) and (s[0] == 1) and (s.top == 1)
s[0] = 4
assert list(s) == [4] and str(s) == 'S' and (f'{s}' == 'S')
assert isinstance(s, Stack) and (not isinstance(5, Stack))
assert Stack.make(1, 2).top == 2
s.i = [7]
assert s.top == 7 and s.push(1) is not None
assert hasattr(s, 'pop') and (not hasattr(s, 'nope'))
""",
    "operators of a class": """
class V:
    def __init__(s, x, y): s.x, s.y = (x, y)
    def __add__(s, o): return V(s.x + o.x, s.y + o.y)
    def __eq__(s, o): return (s.x, s.y) == (o.x, o.y)
    def __lt__(s, o): return s.x < o.x
    def __hash__(s): return hash((s.x, s.y))
    def __neg__(s): return V(-s.x, -s.y)
    def __abs__(s): return 5.0
    def __call__(s, z): return z
# tests
assert V(1, 2) + V(3, 4) == V(4, 6)
assert V(1, 2) != V(1, 3) and V(1, 2) < V(2, 0)
assert len({V(1, 2), V(1, 2)}) == 1
assert (-V(1, 2)).x == -1 and abs(V(3, 4)) == 5 and (V(1, 1)(9) == 9)
assert sorted([V(2, 0), V(1, 0)])[0].x == 1
""",
    "data classes, named tuples and enumerations": """
from dataclasses import dataclass
from typing import NamedTuple
from collections import namedtuple
import enum
@dataclass
class P:
    x: int
    y: int = 0
class N(NamedTuple): a: int
Q = namedtuple('Q', 'u v')
class Color(enum.Enum): RED = 1
class St(enum.IntEnum): OK = 200
def f(): return P(1)
def q(): return Q(1, 2)
def c(): return Color.RED
# tests
assert f() == P(1, 0) and f().x == 1 and (repr(f()) == 'P(x=1, y=0)')
assert q() == (1, 2) and q().u == 1 and (Q(1, 2) == (1, 2)) and (N(3).a == 3)
import copy
assert isinstance(q(), tuple) and copy.deepcopy(q()).v == 2 and q()._asdict() == {'u': 1, 'v': 2}
assert c() == Color.RED and Color.RED.value == 1 and Color.RED.name == "RED"
assert Color(1) == Color.RED and St.OK == 200
""",
    "instances that refer to each other": """
class Node:
    def __init__(s, v, n=None): s.val, s.next = (v, n)
def rev(h):
    p = None
    while h: h.next, p, h = (p, h, h.next)
    return p
# tests
h = Node(1, Node(2))
r = rev(h)
assert r.val == 2 and r.next.val == 1 and (r.next.next is None) and (r.next is h) or r.next == h
""",
    "instances of classes of the tests": """
def total(t): return 0 if t is None else t.val + total(t.left) + total(t.right)
def inv(t):
    if t: t.left, t.right = (inv(t.right), inv(t.left))
    return t
def name(o): return type(o).__name__
# tests
class T:
    def __init__(s, v, l=None, r=None): s.val, s.left, s.right = (v, l, r)
    def depth(s): return 1 + max(c.depth() if c else 0 for c in (s.left, s.right))
class Other: pass
t = T(1, T(2), T(3))
assert total(t) == 6
assert inv(t).left.val == 3 and inv(t).depth() == 2 and type(inv(t)) is T
assert name(Other()) == 'Other'
""",
    "printed text": """
def f(x):
    print('hi', x)
    print('é')
# tests
import io, contextlib
b = io.StringIO()
with contextlib.redirect_stdout(b): f(3)
assert b.getvalue() == 'hi 3\\né\\n'
""",
    "standard input": """
import sys
def f(): return int(input('n?')) + int(input())
def g(): return [l.strip() for l in sys.stdin]
def h(): return sys.stdin.buffer.read()
# tests
import io, sys
from unittest.mock import patch
with patch('sys.stdin', io.StringIO('1\\n2\\n3\\n4\\n')): assert f() == 3 and f() == 7
sys.stdin = io.StringIO('a\\nb\\n')
assert g() == ['a', 'b']
sys.stdin = io.StringIO('zz')
assert h() == b'zz'
""",
    "modules that the solution imports": """
import math, random
from math import sqrt
import collections as calendar
def f(): return math.pi
def statistics(x): return x
# tests
assert math.isclose(f(), math.pi)
random.seed(1)
assert sqrt(4) == 2
assert statistics(3) == 3
""",
    "deep recursion": """
def f(n): return 0 if n == 0 else 1 + f(n - 1)
# tests
assert f(900) == 900
try:
    f(10 ** 6)
    assert False
except RecursionError: pass
""",
}


def test_values_and_objects_cross():
    solutions, tests = zip(*(source.split("# tests\n") for source in CROSSES.values()), strict=True)
    rewards = code_tests([*solutions], ["p"] * len(tests), [*tests])
    assert [name for name, reward in zip(CROSSES, rewards, strict=True) if reward != 1.0] == []


def test_linked_lists_and_trees_as_data_sets_have_them():
    node = "class Node:\n    def __init__(self, val, next=None):\n        self.val = val\n        self.next = next\n"
    size = f"{node}def size(head):\n    return 0 if head is None else 1 + size(head.next)\n"
    of_mbpp = "head = Node(1)\nhead.next = Node(2)\nassert size(head) == 2"
    method = f"{node}class Solution:\n    def after(self, head): return Node(head.val + 1, head.next)\n"
    of_leetcode = f"{node}def check(candidate):\n    made = candidate(head=Node(1, Node(5)))\n"
    of_leetcode += "    assert type(made) is Node and (made.val, made.next.val) == (2, 5)"
    given = [size, method], ["p"] * 2, [of_mbpp, of_leetcode], ["size", "Solution().after"]
    assert code_tests(*given) == [1.0, 1.0]


def test_what_does_not_cross_fails():
    refused = [
        ("def f(): pass", "f(object())"),  # of no class of the tests, and nothing to call
        ("def f(x): return x", "assert f('x' * 2**25)"),  # larger than what crosses
        ("class A: pass", "class B(A): pass"),  # the tests extend a class of the solution
        ("class A:\n    __contains__ = lambda *a: True\ndef f(): return A()", "assert 3 in f()"),
        ("class A:\n    __mul__ = lambda *a: 3\ndef f(): return A()", "assert f() * 2 == 3"),
        (
            "class R: startswith = lambda *a: True\nclass Model:\n    def __call__(self, x): return R()",
            "assert Model()(1).startswith('7')",
        ),
        ("def f(g): return g(1)", "assert f(lambda x: x) == 1"),  # a function of the tests
        ("class A:\n    startswith = lambda *a: True\ndef f(): return A()", "assert f().startswith('x')"),
        ("import os\ndef f(): os.fork()", "f()"),
    ]
    solutions, tests = ([row[index] for row in refused] for index in (0, 1))
    assert code_tests(solutions, ["p"] * len(tests), tests) == [0.0] * len(tests)


def test_the_entry_point_may_be_named_like_a_builtin():
    check = "def check(candidate):\n    assert candidate([1]) == 42"
    solutions = ["def sum(x): return 42", "def sum(x): return 1"]
    assert code_tests(solutions, ["p"] * 2, [check] * 2, ["sum"] * 2) == [1.0, 0.0]


def test_arrays_cross_where_numpy_is_installed():
    source = "import numpy as np\ndef f(x): return np.asarray(x) * 2\ndef g(): return np.float64(2.5), np.int64(3)"
    tests = "assert np.array_equal(f([1, 2]), [2, 4]) and f(np.ones((2, 2))).shape == (2, 2)\n"
    tests += "assert g() == (2.5, 3) and type(g()[1]) is int"
    assert code_tests([source], ["p"], [tests], sandbox="none", memory_mb=8192, timeout_s=60.0) == [1.0]
