//! Runs templates within limits, and with Python's arithmetic.
//!
//! A template is a program from a file. Fuel limits how long it runs, but doubling a long text ten times takes no
//! time and all memory. So a compiled template is changed before it runs: instructions that create or print values
//! call the functions below, which count bytes against a budget. Templates cannot call these functions themselves,
//! because their names are not identifiers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, eval, make_string_output,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::taint::Taint;
use super::{jinja, lists, python};

/// The bytes that one rendering may create, all strings and lists together. A conversation of megabytes takes a few
/// times its size, and tainted characters have four bytes.
const BUDGET: u64 = 512 << 20;

/// The state of one rendering.
#[derive(Debug)]
pub(super) struct Run {
    /// The bytes that it may still create.
    left: AtomicU64,
    /// The marks of the request's texts.
    pub(super) taint: Taint,
}

impl Run {
    pub(super) fn new(taint: Taint) -> Run {
        Run { left: AtomicU64::new(BUDGET), taint }
    }

    /// Takes `bytes` from the budget.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Error> {
        let bytes = bytes as u64;
        let taken =
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        match taken {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("the template creates more than {} MiB of text", BUDGET >> 20),
            )),
        }
    }

    /// Refuses a value that is nested too deeply.
    pub(super) fn check_depth(&self, value: &Value) -> Result<(), Error> {
        fn visit(value: &Value, depth: usize, run: &Run) -> Result<(), Error> {
            let map = value.kind() == ValueKind::Map;
            if !map && value.kind() != ValueKind::Seq {
                return Ok(());
            }
            if depth == MAX_DEPTH {
                return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deep"));
            }
            for item in value.try_iter()? {
                run.take(VISIT)?;
                if map {
                    visit(&value.get_item(&item)?, depth + 1, run)?;
                } else {
                    visit(&item, depth + 1, run)?;
                }
            }
            Ok(())
        }
        visit(value, 0, self)
    }

    /// Counts a value that was created elsewhere.
    pub(super) fn count(&self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.take(value.as_str().map_or(0, str::len)),
            ValueKind::Seq | ValueKind::Map => self.take(value.len().unwrap_or(0).saturating_mul(ITEM)),
            _ => Ok(()),
        }
    }
}

/// The bytes that an element of a list counts.
pub(super) const ITEM: usize = 64;

// The names by which changed templates call the functions.
const PRINT: &str = "{{}}";
const COUNT: &str = "count()";
const NEST: &str = "[[]]";
const CONCAT: &str = "~";
const ADD: &str = "+";
const MULTIPLY: &str = "*";
const SLICE: &str = "[:]";
const PLAIN: &str = "==";
const CONTAINER: &str = "in";
const CHANGEABLE: &str = "[]";
const METHOD: &str = ".";

/// The settings of Hugging Face's `apply_chat_template`.
fn config() -> TemplateConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    TemplateConfig {
        syntax_config: syntax.expect("the delimiters are the default ones"),
        // A prompt is not HTML.
        default_auto_escape: Arc::new(|_| AutoEscape::None),
    }
}

/// Whether the source of a template compiles.
pub(super) fn check(source: &str) -> Result<(), Error> {
    CompiledTemplate::new(NAME, source, &config()).map(|_| ())
}

/// The template's name in messages.
const NAME: &str = "chat";

/// Renders a template.
pub(super) fn render(
    environment: &Environment,
    source: &str,
    mut variables: Vec<(&str, Value)>,
    run: &Arc<Run>,
) -> Result<String, Error> {
    let compiled = CompiledTemplate::new(NAME, source, &config())?;
    let root = guarded(&compiled.instructions);
    let blocks: BTreeMap<&str, Instructions> =
        compiled.blocks.iter().map(|(name, block)| (*name, guarded(block))).collect();
    variables.extend(functions(run).map(|(name, function)| (name as &str, function)));
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    eval(environment, &root, Value::from_pairs(variables), &blocks, &mut out, AutoEscape::None)?;
    Ok(text)
}

/// The functions as variables of the template.
fn functions(run: &Arc<Run>) -> impl Iterator<Item = (&'static str, Value)> {
    type Function = fn(&Run, &[Value]) -> Result<Value, Error>;
    let all: [(&str, Function); 11] = [
        (PRINT, print),
        (COUNT, count),
        (NEST, nest),
        (CONCAT, concat),
        (ADD, add),
        (MULTIPLY, multiply),
        (SLICE, slice),
        (PLAIN, plain),
        (CONTAINER, container),
        (CHANGEABLE, changeable),
        (METHOD, method),
    ];
    let run = Arc::clone(run);
    all.into_iter().map(move |(name, function)| {
        let run = Arc::clone(&run);
        (name, Value::from_function(move |values: Rest<ValueOrKwargs>| function(&run, &values.into_values())))
    })
}

/// Inserts calls of the functions into the instructions.
fn guarded<'s>(instructions: &Instructions<'s>) -> Instructions<'s> {
    use Instruction as I;
    // First the replacement of each instruction, then its new address, because jump targets must follow.
    let mut groups: Vec<Vec<I<'s>>> = Vec::new();
    let mut starts = Vec::new();
    let mut len = 0;
    for instruction in (0..).map_while(|index| instructions.get(index)) {
        let call = |name, count| I::CallFunction(name, Some(count));
        let group = match instruction {
            I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), call(PRINT, 1), I::Emit],
            I::Emit => vec![call(PRINT, 1), I::Emit],
            I::StringConcat => vec![call(CONCAT, 2)],
            I::Add => vec![call(ADD, 2)],
            I::Mul => vec![call(MULTIPLY, 2)],
            I::Slice => vec![call(SLICE, 4)],
            made @ I::CallFunction(..) => vec![made.clone(), call(COUNT, 1), call(NEST, 1)],
            made @ (I::ApplyFilter(..) | I::CallMethod(..) | I::CallObject(..) | I::EndCapture) => {
                vec![made.clone(), call(COUNT, 1)]
            }
            // Both operands of a comparison become plain.
            I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte | I::CompareAndPreserve(_) => {
                vec![call(PLAIN, 1), I::Swap, call(PLAIN, 1), I::Swap, instruction.clone()]
            }
            I::In => vec![call(CONTAINER, 1), I::Swap, call(PLAIN, 1), I::Swap, I::In],
            I::GetItem => vec![call(PLAIN, 1), I::GetItem],
            // A constant is shared by all renderings, but a template may change its lists.
            I::LoadConst(value) if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) => {
                vec![instruction.clone(), call(CHANGEABLE, 1)]
            }
            I::GetAttr(name) if jinja::may_be_method(name) => {
                vec![I::DupTop, I::GetAttr(name), I::Swap, I::LoadConst(Value::from(*name)), call(METHOD, 3)]
            }
            made @ I::BuildList(_) => vec![made.clone(), call(NEST, 1), call(CHANGEABLE, 1)],
            made @ (I::BuildTuple(_) | I::BuildMap(_)) => vec![made.clone(), call(NEST, 1)],
            // The value is under its target namespace on the stack.
            I::SetAttr(_) => vec![I::Swap, call(NEST, 1), I::Swap, instruction.clone()],
            other => vec![other.clone()],
        };
        starts.push(len);
        len += group.len() as u32;
        groups.push(group);
    }
    starts.push(len);
    let mut changed = Instructions::new(instructions.name(), instructions.source());
    for (index, group) in (0..).zip(groups) {
        for mut instruction in group {
            if let I::Iterate(target)
            | I::Jump(target)
            | I::JumpIfFalse(target)
            | I::JumpIfFalseOrPop(target)
            | I::JumpIfTrueOrPop(target)
            | I::BuildMacro(_, target, _) = &mut instruction
            {
                *target = starts[*target as usize];
            }
            match (instructions.get_span(index), instructions.get_line(index)) {
                (Some(span), _) => changed.add_with_span(instruction, span),
                (None, Some(line)) => changed.add_with_line(instruction, line as u16),
                (None, None) => changed.add(instruction),
            };
        }
    }
    changed
}

fn print(run: &Run, values: &[Value]) -> Result<Value, Error> {
    match values {
        [value] if value.kind() == ValueKind::String => {
            run.count(value)?;
            Ok(value.clone())
        }
        _ => concat(run, values),
    }
}

/// Counts a new value. A lazy value becomes a list, because lazy values nested without end would overflow the stack.
fn count(run: &Run, values: &[Value]) -> Result<Value, Error> {
    let mut value = values.first().cloned().unwrap_or_default();
    if value.kind() == ValueKind::Iterable {
        value = Value::from(list(&value, run)?);
    }
    run.count(&value)?;
    Ok(value)
}

/// The deepest nesting of values: the library walks values recursively, even to free them.
const MAX_DEPTH: usize = 200;

/// The bytes that a visit of an element counts.
const VISIT: usize = 8;

/// Checks the depth of a value. A map with tainted keys can be looked up with plain keys from here on.
fn nest(run: &Run, values: &[Value]) -> Result<Value, Error> {
    let value = values.first().cloned().unwrap_or_default();
    run.check_depth(&value)?;
    Ok(run.taint.find_by_plain_keys(value))
}

/// A list that the template may change.
fn changeable(run: &Run, values: &[Value]) -> Result<Value, Error> {
    let value = values.first().cloned().unwrap_or_default();
    run.count(&value)?;
    Ok(lists::changeable(value))
}

/// An attribute, or a method of that name.
fn method(_: &Run, values: &[Value]) -> Result<Value, Error> {
    let [attribute, value, name] = values else { return Err(Error::from(ErrorKind::MissingArgument)) };
    let method = name.as_str().and_then(|name| jinja::bound_method(value, name));
    Ok(method.unwrap_or_else(|| attribute.clone()))
}

/// The value with plain texts, for a comparison.
fn plain(run: &Run, values: &[Value]) -> Result<Value, Error> {
    // Visiting all elements takes time, which is counted.
    let value = nest(run, values)?;
    run.take(text_bytes(&value))?;
    Ok(run.taint.plain(&value))
}

/// The bytes of all texts in a value that is not nested too deeply.
fn text_bytes(value: &Value) -> usize {
    match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq => value.try_iter().into_iter().flatten().map(|item| text_bytes(&item)).sum(),
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            pairs.map(|(key, value)| text_bytes(&key) + text_bytes(&value)).sum()
        }
        _ => 0,
    }
}

/// A container to search. Maps find tainted keys by plain ones.
fn container(run: &Run, values: &[Value]) -> Result<Value, Error> {
    match values {
        [map] if map.kind() == ValueKind::Map => Ok(map.clone()),
        _ => plain(run, values),
    }
}

fn concat(run: &Run, values: &[Value]) -> Result<Value, Error> {
    let mut text = String::new();
    for value in values {
        python::write(value, run, &mut text)?;
    }
    Ok(Value::from(text))
}

fn add(run: &Run, values: &[Value]) -> Result<Value, Error> {
    let (left, right) = two(values)?;
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        run.take(left.len() + right.len())?;
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(left) && is_list(right) {
        let mut items = list(left, run)?;
        items.extend(list(right, run)?);
        let tuple = left.is_tuple() && right.is_tuple();
        return Ok(if tuple { Value::from(Tuple::from(items)) } else { Value::from(items) });
    }
    python::arithmetic(left, right, i128::checked_add, |a, b| a + b)
        .unwrap_or_else(|| impossible("+", left, right))
}

fn multiply(run: &Run, values: &[Value]) -> Result<Value, Error> {
    let (left, right) = two(values)?;
    // A negative count repeats zero times, as in Python.
    let times = |value: &Value| i64::try_from(value.clone()).map(|n| usize::try_from(n).unwrap_or(0));
    for (value, other) in [(left, right), (right, left)] {
        if let (Some(text), Ok(times)) = (value.as_str(), times(other)) {
            run.take(text.len().saturating_mul(times))?;
            return Ok(Value::from(text.repeat(times)));
        }
        if let (true, Ok(times)) = (is_list(value), times(other)) {
            let items = list(value, run)?;
            run.take(items.len().saturating_mul(times).saturating_mul(ITEM))?;
            return Ok(std::iter::repeat_n(items, times).flatten().collect());
        }
    }
    python::arithmetic(left, right, i128::checked_mul, |a, b| a * b)
        .unwrap_or_else(|| impossible("*", left, right))
}

fn slice(run: &Run, values: &[Value]) -> Result<Value, Error> {
    let [value, start, stop, step] = values else { return Err(Error::from(ErrorKind::MissingArgument)) };
    let number =
        |value: &Value| if value.is_none() { Ok(None) } else { i64::try_from(value.clone()).map(Some) };
    let range = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    if let Some(text) = value.as_str() {
        run.take(text.len())?;
        let chars: Vec<char> = text.chars().collect();
        return Ok(Value::from(python::indices(range, chars.len())?.map(|i| chars[i]).collect::<String>()));
    }
    if !is_list(value) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("{} cannot be sliced", value.kind())));
    }
    let items = list(value, run)?;
    let picked: Vec<Value> = python::indices(range, items.len())?.map(|i| items[i].clone()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(picked)) } else { Value::from(picked) })
}

fn two(values: &[Value]) -> Result<(&Value, &Value), Error> {
    match values {
        [left, right] => Ok((left, right)),
        _ => Err(Error::from(ErrorKind::MissingArgument)),
    }
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// The elements of a list.
fn list(value: &Value, run: &Run) -> Result<Vec<Value>, Error> {
    let mut items = Vec::new();
    for item in value.try_iter()? {
        run.take(ITEM)?;
        items.push(item);
    }
    Ok(items)
}

fn impossible(operator: &str, left: &Value, right: &Value) -> Result<Value, Error> {
    let message = format!("{operator} cannot be used on {} and {}", left.kind(), right.kind());
    Err(Error::new(ErrorKind::InvalidOperation, message))
}
