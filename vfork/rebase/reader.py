# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Reads a module of ours, or inserted statements, and notes its uses of upstream."""

import ast
import builtins
import re
from collections.abc import Callable, Iterable

from vfork.rebase import classes, facts
from vfork.rebase.facts import Fact, Facts, Key
from vfork.rebase.scopes import Passed, Scope, bound_names
from vfork.rebase.signatures import Function, bind, of_class, of_function
from vfork.rebase.symbols import CLASS, Member, Symbol, Symbols, absolute
from vfork.rebase.values import Value, of_annotation, of_member, of_result, of_symbol

_DOTTED = re.compile(r"vllm(\.[A-Za-z_]\w*)+([:.][A-Za-z_]\w*)*")
_BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__class__"}


class Reader:
    """Notes facts about one file of a tree.

    `subject` names what is read in keys. `keep` maps a line of the file to the line
    to note, or to None to note nothing there. `free_names`: note names that nothing
    binds, which matters where statements of ours stand in a function of upstream.
    `passed` collects what calls pass to functions of ours, and tells it where a
    parameter's annotation does not.
    """

    def __init__(
        self,
        symbols: Symbols,
        module: str,
        keep: Callable[[int], tuple[str, int] | None],
        *,
        free_names: bool = False,
        passed: Passed | None = None,
    ) -> None:
        self.symbols = symbols
        self.module = module
        self.keep = keep
        self.free_names = free_names
        self.passed: Passed = {} if passed is None else passed
        self.facts: Facts = {}

    # Notes

    def key(self, node: ast.AST, kind: str, text: str = "") -> Key | None:
        where = self.keep(getattr(node, "lineno", 0))
        if where is None:
            return None
        return Key(*where, kind, text or ast.unparse(node)[:200])

    def note(self, fact: Fact | None) -> None:
        if fact is not None:
            self.facts.setdefault(fact.key, fact)

    # Statements

    def read(self) -> Facts:
        body = self.symbols.body(self.module)
        if body is not None:
            self.block(body.body, Scope())
        return self.facts

    def block(self, stmts: Iterable[ast.stmt], scope: Scope) -> None:
        # Outside of functions, only what is noted matters; inside, assignments to
        # local names tell what these hold.
        outside = scope.outer is None or scope.cls is not None
        for stmt in stmts:
            if not outside or self._wanted(stmt):
                self.statement(stmt, scope)

    def statement(self, stmt: ast.stmt, scope: Scope) -> None:
        match stmt:
            case ast.Import() | ast.ImportFrom():
                self._import(stmt, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(stmt, scope)
            case ast.ClassDef():
                self._class(stmt, scope)
            case ast.Assign():
                value = self.expr(stmt.value, scope)
                for target in stmt.targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign():
                value = self.expr(stmt.value, scope) if stmt.value else None
                given = of_annotation(self.symbols, self.module, stmt.annotation)
                self._assign(stmt.target, given or value, scope)
            case ast.If():
                self._if(stmt, scope)
            case _:
                self._other(stmt, scope)

    def _other(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expr(child, scope)
            elif isinstance(child, ast.stmt):
                self.statement(child, scope)
            else:
                self._other(child, scope)

    def _assign(self, target: ast.expr, value: Value | None, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            if scope.outer is not None:
                scope.values[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.expr(target.value, scope)
        else:
            self.expr(target, scope)
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and scope.outer is not None:
                    scope.values[node.id] = None

    def _if(self, stmt: ast.If, scope: Scope) -> None:
        """`if isinstance(x, Y)` tells what x is in the block."""
        self.expr(stmt.test, scope)
        test = stmt.test
        narrowed: tuple[str, Value | None] | None = None
        if (
            isinstance(test, ast.Call)
            and isinstance(test.func, ast.Name)
            and test.func.id == "isinstance"
            and len(test.args) == 2
            and isinstance(test.args[0], ast.Name)
        ):
            cls = self.expr(test.args[1], scope)
            if cls is not None and cls.form == "class":
                narrowed = (test.args[0].id, Value("instance", cls.symbol))
        if narrowed is None:
            self.block(stmt.body, scope)
        else:
            inner = Scope(scope)
            inner.values[narrowed[0]] = narrowed[1]
            self.block(stmt.body, inner)
        self.block(stmt.orelse, scope)

    def _import(self, stmt: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        source = ""
        if isinstance(stmt, ast.ImportFrom):
            source = absolute(stmt, self.module, self.symbols.tree)
        for alias in stmt.names:
            whole = f"{source}.{alias.name}" if source else alias.name
            if whole.split(".")[0] == "vllm":
                key = self.key(stmt, "import", whole)
                pair = (source, alias.name) if source else (alias.name, "")
                if key is not None:
                    self.note(facts.import_fact(self.symbols, key, *pair))
            if scope.outer is not None:
                scope.values[alias.asname or alias.name.split(".")[0]] = self._imported(
                    stmt, source, alias
                )

    def _imported(self, stmt: ast.stmt, source: str, alias: ast.alias) -> Value | None:
        if source:
            found = self.symbols.imported(source, alias.name)
        else:
            name = alias.name if alias.asname else alias.name.split(".")[0]
            found = self.symbols.module(name)
        return of_symbol(self.symbols, found)

    def _function(self, node: Function, scope: Scope) -> None:
        for decorator in node.decorator_list:
            self.expr(decorator, scope)
        if not self._wanted(node):
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.expr(default, scope)
        inner = Scope(scope)
        inner.names = self._bound(node)
        cls = scope.cls
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for index, p in enumerate(every):
            value = of_annotation(self.symbols, self.module, p.annotation)
            if cls is not None and index == 0 and value is None:
                static = any(
                    ast.unparse(d) == "staticmethod" for d in node.decorator_list
                )
                itself = any(
                    ast.unparse(d) == "classmethod" for d in node.decorator_list
                )
                if not static:
                    value = Value("class" if itself else "instance", cls)
            if value is None and scope.outer is None:
                value = self.passed.get((self.module, node.name, p.arg))
            inner.values[p.arg] = value
        self.block(node.body, inner)

    def _wanted(self, node: ast.stmt) -> bool:
        marks = getattr(node, "decorator_list", ())
        first = min([node.lineno, *(d.lineno for d in marks)])
        last = node.end_lineno or first
        return any(self.keep(line) is not None for line in range(first, last + 1))

    def _bound(self, node: ast.AST) -> set[str]:
        memo = self.symbols.tree.store.memo
        key = ("bound", node)
        if key not in memo:
            memo[key] = bound_names(node)
        result: set[str] = memo[key]
        return result

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        for decorator in node.decorator_list:
            self.expr(decorator, scope)
        bases = [self.expr(base, scope) for base in node.bases]
        if not self._wanted(node):
            return
        symbol = self._own_symbol(node, scope, bases)
        if symbol is not None and self.keep(node.lineno) is not None:
            for fact in classes.class_facts(self.symbols, symbol, self.key):
                self.note(fact)
        inner = Scope(scope, symbol)
        inner.names = self._bound(node)
        self.block(node.body, inner)

    def _own_symbol(
        self, node: ast.ClassDef, scope: Scope, bases: list[Value | None]
    ) -> Symbol | None:
        if scope.outer is None:
            found = self.symbols.lookup(self.module, node.name)
        elif scope.cls is not None:
            found = self.symbols.inner_class(scope.cls, node.name)
        else:
            external = Symbol("external", "", "")
            known = [v.symbol if v and v.form == "class" else external for v in bases]
            return self.symbols.local_class(self.module, node, [*known])
        return found if found is not None and found.node is node else None

    # Expressions

    def expr(self, node: ast.expr | None, scope: Scope) -> Value | None:
        """Notes an expression's uses and tells what it makes, None if unknown."""
        match node:
            case None:
                return None
            case ast.Name():
                return self._name(node, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Subscript():
                return self._subscript(node, scope)
            case ast.Constant():
                if isinstance(node.value, str):
                    self._string(node, node.value)
                return None
            case ast.Lambda():
                inner = Scope(scope)
                inner.names = self._bound(node)
                return self.expr(node.body, inner)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner = Scope(scope)
                inner.names = self._bound(node)
                self._other(node, inner)
                return None
            case ast.NamedExpr():
                value = self.expr(node.value, scope)
                scope.values[node.target.id] = value
                return value
        self._other(node, scope)
        return None

    def _name(self, node: ast.Name, scope: Scope) -> Value | None:
        known, value = scope.find(node.id)
        if not known:
            symbol = self.symbols.lookup(self.module, node.id)
            known = symbol is not None or node.id in _BUILTINS
            value = of_symbol(self.symbols, symbol)
        if self.free_names and isinstance(node.ctx, ast.Load):
            key = self.key(node, "free-name")
            if key is not None:
                problem = "" if known else f"nothing binds {node.id} there"
                self.note(Fact(key, f"{self.module}.{node.id}", problem))
        return value

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Value | None:
        if ast.unparse(node.value).startswith("torch.ops."):
            self._operation(node)
            return None
        outer = self.expr(node.value, scope)
        if outer is None:
            return None
        if outer.form == "module":
            return self._module_attribute(node, outer.symbol)
        if outer.form == "function":
            return None
        return self._member(node, outer, node.attr)

    def _module_attribute(self, node: ast.Attribute, module: Symbol) -> Value | None:
        found = self.symbols.lookup(module.module, node.attr)
        key = self.key(node, "attribute")
        if key is not None and not self.symbols.is_ours(module):
            self.note(facts.import_fact(self.symbols, key, module.module, node.attr))
        return of_symbol(self.symbols, found)

    def _member(self, node: ast.expr, outer: Value, name: str) -> Value | None:
        key = self.key(node, "attribute") or Key("", 0, "", "")
        skip = 1 if outer.form == "super" else 0
        fact, member = facts.member_fact(
            self.symbols, key, outer.symbol, name, skip=skip
        )
        if key.subject:
            self.note(fact)
        if member is None:
            return None
        return of_member(self.symbols, outer, member)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value | None:
        outer = self.expr(node.value, scope)
        self.expr(node.slice, scope)
        name = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if outer is None or outer.form != "class" or not isinstance(name, str):
            return None
        if not self.symbols.is_enum(outer.symbol):
            return None
        return self._member(node, outer, name)

    def _string(self, node: ast.Constant, text: str) -> None:
        key = self.key(node, "string")
        if key is None or not _DOTTED.fullmatch(text):
            return
        self.note(classes.string_fact(self.symbols, key, text))

    def _operation(self, node: ast.Attribute) -> None:
        key = self.key(node, "operation")
        if key is not None:
            _, _, namespace, name = [*ast.unparse(node).split("."), "", ""][:4]
            if name:
                self.note(classes.operation_fact(self.symbols, key, namespace, name))

    # Calls

    def _call(self, node: ast.Call, scope: Scope) -> Value | None:
        if isinstance(node.func, ast.Name):
            special = self._special(node, node.func.id, scope)
            if special is not None:
                return special
        called = self.expr(node.func, scope)
        given = [self.expr(argument, scope) for argument in node.args]
        named = {k.arg: self.expr(k.value, scope) for k in node.keywords}
        self._pass(called, given, named)
        if called is None:
            return None
        key = self.key(node, "call")
        if key is not None:
            self.note(self._call_fact(key, called, node))
        return of_result(self.symbols, called)

    def _pass(
        self,
        called: Value | None,
        given: list[Value | None],
        named: dict[str | None, Value | None],
    ) -> None:
        """Keeps what a call passes to a function of ours; None if calls differ."""
        if called is None or called.form != "function" or called.member is not None:
            return
        symbol = called.symbol
        if not self.symbols.is_ours(symbol) or not isinstance(symbol.node, Function):
            return
        names = [p.arg for p in symbol.node.args.args]
        for name, value in (*zip(names, given, strict=False), *named.items()):
            if name is not None and (value is None or value.form != "super"):
                key = (symbol.module, symbol.name, name)
                known = self.passed.get(key, value)
                self.passed[key] = value if known == value else None

    def _special(self, node: ast.Call, name: str, scope: Scope) -> Value | None:
        own = scope.own_class()
        if name == "super" and not node.args and own is not None:
            return Value("super", own)
        if name == "cast" and len(node.args) == 2:
            self.expr(node.args[1], scope)
            return of_annotation(self.symbols, self.module, node.args[0])
        if name in ("getattr", "hasattr") and len(node.args) >= 2:
            self._soft(node, scope)
        return None

    def _soft(self, node: ast.Call, scope: Scope) -> None:
        """`getattr` and `hasattr` do without the attribute; still, it may come or
        go."""
        outer = self.expr(node.args[0], scope)
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        key = self.key(node, "soft-attribute")
        if outer is None or key is None or not isinstance(name, str):
            return
        if outer.form in ("instance", "class"):
            fact, _ = facts.member_fact(self.symbols, key, outer.symbol, name)
            if fact is not None:
                shape = fact.shape or "absent"
                self.note(Fact(key, fact.target, shape=shape, where=fact.where))

    def _call_fact(self, key: Key, called: Value, node: ast.Call) -> Fact | None:
        symbols = self.symbols
        if called.form == "class":
            return self._constructor_fact(key, called.symbol, node)
        if called.form != "function" or symbols.is_ours(called.symbol):
            return None
        target = called.member.node if called.member else called.symbol.node
        if not isinstance(target, Function):
            return None
        signature = of_function(target, bound=called.bound)
        name = f"{called.symbol}.{target.name}" if called.member else str(called.symbol)
        return Fact(
            key,
            name,
            problem=bind(signature, node),
            shape=signature.text,
            parts=((target.name, facts.body_of(symbols, target)),),
            where=facts.place_text(symbols, called.symbol, target),
            symbol=called.symbol,
        )

    def _constructor_fact(self, key: Key, cls: Symbol, node: ast.Call) -> Fact | None:
        symbols = self.symbols
        init = symbols.member(cls, "__init__")
        owner = init.owner if init else cls
        if cls.kind != CLASS or symbols.is_ours(owner):
            return None
        signature = of_class(symbols, cls)
        if signature is None:
            return Fact(key, str(cls), known=False)
        parts = [
            (name, facts.body_of(symbols, found.node))
            for name in ("__init__", "__post_init__")
            if (found := symbols.member(cls, name)) and _upstream(symbols, found)
        ]
        return Fact(
            key,
            str(cls),
            problem=bind(signature, node),
            shape=signature.text,
            parts=tuple(parts),
            where=facts.place_text(symbols, owner, init.node if init else None),
            symbol=cls,
        )


def _upstream(symbols: Symbols, member: Member) -> bool:
    return not symbols.is_ours(member.owner)
