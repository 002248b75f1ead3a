//! Rewrites a template so that every value it creates is charged to its allowance (`template_limits.rs`).
//!
//! The syntax tree is copied with calls added. Text between tags becomes expressions, so that all output
//! passes the formatter, which counts it. Operands, inputs of filters and values that are kept pass functions
//! of `template_limits.rs`. A template that nests too deeply is refused here, because the engine would
//! recurse into it.
//! Left out: the limits at run time, which those functions check.

use minijinja::machinery::ast::{
    BinOp, BinOpKind, Break, Call, CallArg, CallBlock, Compare, CompareOp, Const, Continue, Do, EmitExpr,
    Expr, Filter, FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map, Set, SetBlock,
    Slice, Spanned, Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
};
use minijinja::machinery::{CodeGenerator, Instructions, Span, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind, Value};

use super::python_operators::{ADD, ATTRIBUTE, DICT_METHODS, ITEM, REMAINDER, TEXT};
use super::template_limits::{BRIEF, CHARGE, EACH, FACTOR, KEEP, SPENT, TIMES, WEIGH};

/// Published templates have up to 30,000 bytes.
const MOST_SOURCE_BYTES: usize = 1_000_000;
/// Nested expressions and blocks; every term of a sum is one level.
const MOST_DEPTH: usize = 150;
/// The parser recurses on these without a limit.
const MOST_REPEATED: [(&str, usize); 4] = [("elif", 300), ("else", 1000), ("not", 300), ("-", 1000)];

/// Filters whose output is small, or not larger than their input.
const LIGHT_FILTERS: [&str; 11] =
    ["length", "count", "first", "last", "items", "attr", "trim", "int", "float", "bool", "abs"];
/// Filters that make a list; of a text, a list of its characters.
#[rustfmt::skip]
const EACH_FILTERS: [&str; 13] = [
    "list", "map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "sort", "unique",
    "groupby", "min", "max",
];
/// Filters whose input may be undefined. They do not copy it.
const UNCHARGED_FILTERS: [&str; 2] = ["default", "d"];
/// Filters that use their arguments for every element.
const ELEMENT_FILTERS: [&str; 5] = ["map", "select", "reject", "selectattr", "rejectattr"];
/// Tests that read through a whole value.
#[rustfmt::skip]
const COMPARING_TESTS: [&str; 19] = [
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=",
    "in", "sameas", "lower", "upper",
];

/// A node of the tree with its place in the source.
macro_rules! node {
    ($kind:ident::$name:ident { $($fields:tt)* }, $span:expr) => {
        $kind::$name(Spanned::new($name { $($fields)* }, $span))
    };
}

/// Compiles a template. `name` is for error messages.
pub(super) fn compile(
    name: &'static str,
    source: &'static str,
    syntax: SyntaxConfig,
) -> Result<Instructions<'static>, Error> {
    let tree = parse(source, name, syntax)?;
    let rewritten = match rewrite(&tree, Depth(0)) {
        Ok(rewritten) => rewritten,
        Err(error) => {
            // Freeing a deep tree would recurse as deeply.
            std::mem::forget(tree);
            return Err(error);
        }
    };
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&rewritten);
    Ok(generator.finish().0)
}

/// Refuses sources on which the parser would run out of stack.
pub(super) fn check_source(source: &str) -> Result<(), Error> {
    if source.len() > MOST_SOURCE_BYTES {
        return Err(refused(format!(
            "it has {} bytes, at most {MOST_SOURCE_BYTES} are allowed",
            source.len()
        )));
    }
    for (word, most) in MOST_REPEATED {
        let is_repeated = match word {
            "elif" | "else" => source.matches(word).count() > most,
            word => {
                let packed: String = source.split_whitespace().collect();
                packed.contains(&word.repeat(most))
            }
        };
        if is_repeated {
            return Err(too_deep());
        }
    }
    Ok(())
}

fn refused(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::SyntaxError, what)
}

fn too_deep() -> Error {
    refused("it is nested too deeply")
}

/// How deep a node is in the tree.
#[derive(Clone, Copy)]
struct Depth(usize);

impl Depth {
    fn below(self) -> Result<Depth, Error> {
        if self.0 == MOST_DEPTH { Err(too_deep()) } else { Ok(Depth(self.0 + 1)) }
    }
}

/// A call with two arguments.
fn call_with<'a>(function: &'static str, first: Expr<'a>, second: Expr<'a>, span: Span) -> Expr<'a> {
    let expr = node!(Expr::Var { id: function }, span);
    node!(Expr::Call { expr, args: vec![CallArg::Pos(first), CallArg::Pos(second)] }, span)
}

type Rewritten<T> = Result<T, Error>;

fn call<'a>(function: &'static str, value: Expr<'a>, span: Span) -> Expr<'a> {
    let expr = node!(Expr::Var { id: function }, span);
    node!(Expr::Call { expr, args: vec![CallArg::Pos(value)] }, span)
}

fn rewrite<'a>(stmt: &Stmt<'a>, depth: Depth) -> Rewritten<Stmt<'a>> {
    let depth = depth.below()?;
    let body =
        |stmts: &[Stmt<'a>]| stmts.iter().map(|stmt| rewrite(stmt, depth)).collect::<Rewritten<Vec<_>>>();
    let expr = |inner: &Expr<'a>| expr_of(inner, depth);
    Ok(match stmt {
        Stmt::Template(node) => {
            // The last thing that it does is to note how much it did.
            let nothing = node!(Expr::Const { value: Value::from("") }, node.span());
            let spent = EmitExpr { expr: call(SPENT, nothing, node.span()) };
            let mut children = body(&node.children)?;
            children.push(Stmt::EmitExpr(Spanned::new(spent, node.span())));
            node!(Stmt::Template { children }, node.span())
        }
        Stmt::EmitExpr(node) => node!(Stmt::EmitExpr { expr: expr(&node.expr)? }, node.span()),
        Stmt::EmitRaw(node) => {
            let text = node!(Expr::Const { value: Value::from(node.raw) }, node.span());
            node!(Stmt::EmitExpr { expr: text }, node.span())
        }
        Stmt::ForLoop(node) => node!(
            Stmt::ForLoop {
                target: target_of(&node.target, depth)?,
                iter: call(EACH, expr(&node.iter)?, node.span()),
                filter_expr: node.filter_expr.as_ref().map(expr).transpose()?,
                recursive: node.recursive,
                body: body(&node.body)?,
                else_body: body(&node.else_body)?,
            },
            node.span()
        ),
        Stmt::IfCond(node) => {
            let (true_body, false_body) = (body(&node.true_body)?, body(&node.false_body)?);
            node!(Stmt::IfCond { expr: expr(&node.expr)?, true_body, false_body }, node.span())
        }
        Stmt::WithBlock(node) => {
            let pair = |(target, value): &(Expr<'a>, Expr<'a>)| -> Rewritten<_> {
                Ok((target_of(target, depth)?, expr(value)?))
            };
            let assignments = node.assignments.iter().map(pair).collect::<Rewritten<Vec<_>>>()?;
            node!(Stmt::WithBlock { assignments, body: body(&node.body)? }, node.span())
        }
        Stmt::Set(node) => {
            let value = expr(&node.expr)?;
            // A field of a namespace outlives the loop or macro that sets it.
            let value = match &node.target {
                Expr::GetAttr(_) => call(KEEP, value, node.span()),
                _ => value,
            };
            let target = target_of(&node.target, depth)?;
            node!(Stmt::Set { target, expr: value }, node.span())
        }
        Stmt::SetBlock(node) => {
            let filter = node.filter.as_ref().map(expr).transpose()?;
            node!(
                Stmt::SetBlock { target: target_of(&node.target, depth)?, filter, body: body(&node.body)? },
                node.span()
            )
        }
        Stmt::FilterBlock(node) => {
            node!(Stmt::FilterBlock { filter: expr(&node.filter)?, body: body(&node.body)? }, node.span())
        }
        Stmt::Macro(node) => Stmt::Macro(macro_of(node, depth)?),
        Stmt::CallBlock(node) => {
            let (call, macro_decl) = (call_of(&node.call, depth)?, macro_of(&node.macro_decl, depth)?);
            node!(Stmt::CallBlock { call, macro_decl }, node.span())
        }
        Stmt::Do(node) => node!(Stmt::Do { call: call_of(&node.call, depth)? }, node.span()),
        Stmt::Continue(node) => Stmt::Continue(Spanned::new(Continue, node.span())),
        Stmt::Break(node) => Stmt::Break(Spanned::new(Break, node.span())),
        Stmt::AutoEscape(_) => return Err(refused("`autoescape` is not supported")),
        Stmt::Block(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
            return Err(refused("it uses other templates, which is not supported"));
        }
    })
}

fn macro_of<'a>(node: &Spanned<Macro<'a>>, depth: Depth) -> Rewritten<Spanned<Macro<'a>>> {
    let args = node.args.iter().map(|arg| target_of(arg, depth)).collect::<Rewritten<Vec<_>>>()?;
    let defaults = exprs_of(&node.defaults, depth)?;
    let body = node.body.iter().map(|stmt| rewrite(stmt, depth)).collect::<Rewritten<Vec<_>>>()?;
    Ok(Spanned::new(Macro { name: node.name, args, defaults, body }, node.span()))
}

fn call_of<'a>(node: &Spanned<Call<'a>>, depth: Depth) -> Rewritten<Spanned<Call<'a>>> {
    let expr = match &node.expr {
        // A method that is called is no attribute.
        Expr::GetAttr(method) => {
            let expr = expr_of(&method.expr, depth.below()?)?;
            node!(Expr::GetAttr { expr, name: method.name }, method.span())
        }
        other => expr_of(other, depth)?,
    };
    let rewritten = Call { expr, args: args_of(&node.args, depth, None)? };
    Ok(Spanned::new(rewritten, node.span()))
}

/// The arguments of a call, each passed through `function`.
fn args_of<'a>(
    args: &[CallArg<'a>],
    depth: Depth,
    function: Option<&'static str>,
) -> Rewritten<Vec<CallArg<'a>>> {
    let value = |inner: &Expr<'a>| -> Rewritten<Expr<'a>> {
        let rewritten = expr_of(inner, depth)?;
        Ok(match function {
            Some(function) => call(function, rewritten, inner.span()),
            None => rewritten,
        })
    };
    let arg = |arg: &CallArg<'a>| -> Rewritten<CallArg<'a>> {
        Ok(match arg {
            CallArg::Pos(inner) => CallArg::Pos(value(inner)?),
            CallArg::Kwarg(name, inner) => CallArg::Kwarg(name, value(inner)?),
            CallArg::PosSplat(inner) => CallArg::PosSplat(value(inner)?),
            CallArg::KwargSplat(inner) => CallArg::KwargSplat(value(inner)?),
        })
    };
    args.iter().map(arg).collect()
}

fn exprs_of<'a>(exprs: &[Expr<'a>], depth: Depth) -> Rewritten<Vec<Expr<'a>>> {
    exprs.iter().map(|inner| expr_of(inner, depth)).collect()
}

/// The target of an assignment: a name, a list of names, or a field.
fn target_of<'a>(target: &Expr<'a>, depth: Depth) -> Rewritten<Expr<'a>> {
    let depth = depth.below()?;
    let several =
        |items: &[Expr<'a>]| items.iter().map(|item| target_of(item, depth)).collect::<Rewritten<Vec<_>>>();
    Ok(match target {
        Expr::List(node) => node!(Expr::List { items: several(&node.items)? }, node.span()),
        Expr::Tuple(node) => node!(Expr::Tuple { items: several(&node.items)? }, node.span()),
        other => expr_of(other, depth)?,
    })
}

/// An operand that the engine reads through. Constants are part of the source, so they need no charge.
fn weighed<'a>(inner: &Expr<'a>, depth: Depth) -> Rewritten<Expr<'a>> {
    let rewritten = expr_of(inner, depth)?;
    Ok(if matches!(inner, Expr::Const(_)) { rewritten } else { call(WEIGH, rewritten, inner.span()) })
}

fn expr_of<'a>(expr: &Expr<'a>, depth: Depth) -> Rewritten<Expr<'a>> {
    let depth = depth.below()?;
    let of = |inner: &Expr<'a>| expr_of(inner, depth);
    let optional = |inner: &Option<Expr<'a>>| inner.as_ref().map(of).transpose();
    let span = expr.span();
    Ok(match expr {
        Expr::Var(node) => node!(Expr::Var { id: node.id }, span),
        Expr::Const(node) => node!(Expr::Const { value: node.value.clone() }, span),
        Expr::Slice(node) => {
            let (start, stop, step) = (optional(&node.start)?, optional(&node.stop)?, optional(&node.step)?);
            node!(Expr::Slice { expr: call(CHARGE, of(&node.expr)?, span), start, stop, step }, span)
        }
        Expr::UnaryOp(node) => {
            // The type of `op` is neither `Copy` nor `Clone`.
            let op = if matches!(node.op, UnaryOpKind::Not) { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            node!(Expr::UnaryOp { op, expr: of(&node.expr)? }, span)
        }
        Expr::BinOp(node) => binary_of(node, span, depth)?,
        Expr::Compare(node) => {
            let op = |op: &CompareOp<'a>| -> Rewritten<_> {
                Ok(CompareOp { op: op.op, expr: weighed(&op.expr, depth)? })
            };
            let ops = node.ops.iter().map(op).collect::<Rewritten<Vec<_>>>()?;
            node!(Expr::Compare { expr: weighed(&node.expr, depth)?, ops }, span)
        }
        Expr::IfExpr(node) => {
            let (test_expr, true_expr) = (of(&node.test_expr)?, of(&node.true_expr)?);
            node!(Expr::IfExpr { test_expr, true_expr, false_expr: optional(&node.false_expr)? }, span)
        }
        Expr::Filter(node) => {
            let input = |inner: &Expr<'a>| -> Rewritten<Expr<'a>> {
                let rewritten = of(inner)?;
                Ok(match node.name {
                    name if UNCHARGED_FILTERS.contains(&name) => rewritten,
                    name if LIGHT_FILTERS.contains(&name) => call(CHARGE, rewritten, span),
                    name if EACH_FILTERS.contains(&name) => call(EACH, call(WEIGH, rewritten, span), span),
                    _ => call(WEIGH, rewritten, span),
                })
            };
            let brief = ELEMENT_FILTERS.contains(&node.name).then_some(BRIEF);
            let (expr, args) =
                (node.expr.as_ref().map(input).transpose()?, args_of(&node.args, depth, brief)?);
            node!(Expr::Filter { name: node.name, expr, args }, span)
        }
        Expr::Test(node) => {
            let (expr, function) = if COMPARING_TESTS.contains(&node.name) {
                (weighed(&node.expr, depth)?, Some(WEIGH))
            } else {
                (of(&node.expr)?, None)
            };
            let args = args_of(&node.args, depth, function)?;
            node!(Expr::Test { name: node.name, expr, args }, span)
        }
        Expr::GetAttr(node) if DICT_METHODS.contains(&node.name) => {
            let name = node!(Expr::Const { value: Value::from(node.name) }, span);
            call_with(ATTRIBUTE, of(&node.expr)?, name, span)
        }
        Expr::GetAttr(node) => node!(Expr::GetAttr { expr: of(&node.expr)?, name: node.name }, span),
        Expr::GetItem(node) => {
            let (expr, subscript_expr) = (of(&node.expr)?, of(&node.subscript_expr)?);
            let is_method =
                |name: &Const| name.value.as_str().is_some_and(|name| DICT_METHODS.contains(&name));
            match &node.subscript_expr {
                Expr::Const(name) if is_method(name) => call_with(ITEM, expr, subscript_expr, span),
                _ => node!(Expr::GetItem { expr, subscript_expr }, span),
            }
        }
        Expr::Call(node) => Expr::Call(call_of(node, depth)?),
        Expr::List(node) => kept(node!(Expr::List { items: exprs_of(&node.items, depth)? }, span), span),
        Expr::Tuple(node) => kept(node!(Expr::Tuple { items: exprs_of(&node.items, depth)? }, span), span),
        Expr::Map(node) => kept(
            node!(
                Expr::Map { keys: exprs_of(&node.keys, depth)?, values: exprs_of(&node.values, depth)? },
                span
            ),
            span,
        ),
    })
}

/// A value that contains others.
fn kept(rewritten: Expr<'_>, span: Span) -> Expr<'_> {
    if rewritten.as_const().is_some() { rewritten } else { call(KEEP, rewritten, span) }
}

fn binary_of<'a>(node: &BinOp<'a>, span: Span, depth: Depth) -> Rewritten<Expr<'a>> {
    let of = |inner: &Expr<'a>| expr_of(inner, depth);
    let text = |inner: &Expr<'a>| -> Rewritten<_> { Ok(call(TEXT, of(inner)?, inner.span())) };
    let (left, right) = match node.op {
        // `and` and `or` return one of their operands.
        BinOpKind::ScAnd | BinOpKind::ScOr => (of(&node.left)?, of(&node.right)?),
        BinOpKind::Add => return Ok(call_with(ADD, of(&node.left)?, of(&node.right)?, span)),
        BinOpKind::Rem => return Ok(call_with(REMAINDER, of(&node.left)?, of(&node.right)?, span)),
        BinOpKind::Mul => (call(FACTOR, of(&node.left)?, span), call(TIMES, of(&node.right)?, span)),
        BinOpKind::Sub | BinOpKind::Div | BinOpKind::FloorDiv | BinOpKind::Pow => {
            (of(&node.left)?, of(&node.right)?)
        }
        BinOpKind::Concat => (text(&node.left)?, text(&node.right)?),
        BinOpKind::Eq
        | BinOpKind::Ne
        | BinOpKind::Lt
        | BinOpKind::Lte
        | BinOpKind::Gt
        | BinOpKind::Gte
        | BinOpKind::In => (weighed(&node.left, depth)?, weighed(&node.right, depth)?),
    };
    Ok(node!(Expr::BinOp { op: node.op, left, right }, span))
}
