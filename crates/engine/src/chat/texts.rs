//! The filters and methods that templates use on strings, with Python's behaviour.

use std::sync::{Arc, OnceLock};

use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::guard::Run;
use super::taint::Cutter;
use super::{lists, python};

/// Filters of the library that examine characters.
const LOOKING_FILTERS: [&str; 12] = [
    "capitalize",
    "dictsort",
    "e",
    "escape",
    "float",
    "int",
    "lower",
    "max",
    "min",
    "title",
    "unique",
    "upper",
];

/// Tests of the library that examine characters.
const LOOKING_TESTS: [&str; 21] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "endingwith",
    "eq",
    "equalto",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "le",
    "lessthan",
    "lower",
    "lt",
    "ne",
    "sameas",
    "startingwith",
    "upper",
];

/// Adds filters, tests and methods for strings.
pub(super) fn add(environment: &mut Environment, run: &Arc<Run>) {
    for name in LOOKING_FILTERS {
        let taint = run.taint;
        environment.add_filter(name, move |args: Rest<ValueOrKwargs>| {
            let apply = |args: &[Value]| library().empty_state().apply_filter(name, args);
            taint.looking(&args.into_values(), apply)
        });
    }
    for name in LOOKING_TESTS {
        let taint = run.taint;
        environment.add_test(name, move |args: Rest<Value>| {
            let args: Vec<Value> = args.iter().map(|arg| taint.plain(arg)).collect();
            library().empty_state().perform_test(name, &args)
        });
    }
    let own = Arc::clone(run);
    environment
        .set_unknown_method_callback(move |state, value, name, args| method(&own, state, value, name, args));
    let own = Arc::clone(run);
    environment.add_filter("string", move |value: Value| python::text(&value, &own));
    let own = Arc::clone(run);
    environment.add_filter("join", move |value: &Value, separator: Option<Value>, kwargs: Kwargs| {
        let separator = separator.or(kwargs.get("d")?);
        let attribute = kwargs.get::<Option<String>>("attribute")?;
        kwargs.assert_all_used()?;
        match attribute {
            None => join(&own, value, separator.as_ref()),
            Some(path) => {
                let items = value.try_iter()?.map(|item| attribute_of(item, &path));
                join(&own, &items.collect::<Result<Value, _>>()?, separator.as_ref())
            }
        }
    });
    let own = Arc::clone(run);
    environment.add_filter("replace", move |text: &Value, from: &Value, to: &Value, count: Option<i64>| {
        replace(&own, text, from, to, count)
    });
    let own = Arc::clone(run);
    environment.add_filter("format", move |text: &Value, args: Rest<Value>| format(&own, text, &args));
    let own = Arc::clone(run);
    environment
        .add_filter("trim", move |text: &Value, characters: Option<&Value>| trim(&own, text, characters));
    let own = Arc::clone(run);
    environment.add_filter("split", move |text: &Value, args: Rest<ValueOrKwargs>| {
        split(&own, &python::text(text, &own)?, &args.into_values(), false)
    });
    let own = Arc::clone(run);
    environment.add_filter("indent", move |text: &Value, args: Rest<ValueOrKwargs>| {
        indent(&own, text, &args.into_values())
    });
}

/// The library without these additions.
pub(super) fn library() -> &'static Environment<'static> {
    static LIBRARY: OnceLock<Environment> = OnceLock::new();
    LIBRARY.get_or_init(Environment::new)
}

/// The longest string that one filter or method may create, in bytes.
const MAX_TEXT: usize = 256 << 20;

fn check_len(len: usize) -> Result<(), Error> {
    if len <= MAX_TEXT {
        return Ok(());
    }
    let message = format!("the template creates a string of more than {} MiB", MAX_TEXT >> 20);
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The methods of Python's values.
fn method(run: &Run, state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let ends = match name {
        "lstrip" => Ends::Left,
        "rstrip" => Ends::Right,
        _ => Ends::Both,
    };
    if let Some(result) = lists::method(run, value, name, args) {
        return result;
    }
    match (value.as_str(), name, args) {
        // Maps find tainted keys by plain ones.
        (None, "get", [key, rest @ ..]) if value.kind() == ValueKind::Map => {
            let args: Vec<Value> = [&[run.taint.plain(key)], rest].concat();
            unknown_method_callback(state, value, name, &args)
        }
        (None, ..) if value.kind() == ValueKind::Map => unknown_method_callback(state, value, name, args),
        (Some(_), "replace", [from, to]) => replace(run, value, from, to, None).map(Value::from),
        (Some(_), "replace", [from, to, count]) => {
            replace(run, value, from, to, Some(i64::try_from(count.clone())?)).map(Value::from)
        }
        (Some(_), "join", [items]) => join(run, items, Some(value)).map(Value::from),
        (Some(text), "strip" | "lstrip" | "rstrip", [characters]) if characters.as_str().is_some() => {
            Ok(Value::from(strip(run, text, characters.as_str().unwrap_or_default(), ends)))
        }
        (Some(text), "split", _) => split(run, text, args, false),
        (Some(text), "rsplit", _) => split(run, text, args, true),
        // White space is never tainted.
        (Some(_), "strip" | "lstrip" | "rstrip" | "splitlines", _) => {
            unknown_method_callback(state, value, name, args)
        }
        // A number in a format is a width.
        (Some(text), "format", _) if has_wide_field(&run.taint.plain_text(text)) => {
            check_len(usize::MAX).map(|()| Value::UNDEFINED)
        }
        (Some(_), "format", _) if !run.taint.is_tainted(value) => {
            let args = texts(run, args)?;
            unknown_method_callback(state, value, name, &args)
        }
        _ => {
            let all: Vec<Value> = [std::slice::from_ref(value), args].concat();
            run.taint.looking(&all, |all| unknown_method_callback(state, &all[0], name, &all[1..]))
        }
    }
}

/// The arguments of a format: values with tainted texts become strings, which are inserted as they are.
fn texts(run: &Run, args: &[Value]) -> Result<Vec<Value>, Error> {
    let text = |arg: &Value| match arg.kind() {
        ValueKind::Seq | ValueKind::Map if !arg.is_kwargs() && run.taint.is_tainted(arg) => {
            python::text(arg, run).map(Value::from)
        }
        _ => Ok(arg.clone()),
    };
    args.iter().map(text).collect()
}

/// The filter `join`, which converts elements as Python's `str` does.
fn join(run: &Run, value: &Value, separator: Option<&Value>) -> Result<String, Error> {
    let separator = separator.map(|separator| python::text(separator, run)).transpose()?.unwrap_or_default();
    let mut out = String::new();
    for (i, item) in value.try_iter()?.enumerate() {
        if i > 0 {
            out.push_str(&separator);
        }
        python::write(&item, run, &mut out)?;
        check_len(out.len())?;
    }
    Ok(out)
}

/// The attribute of a value at a path such as `function.name`.
fn attribute_of(value: Value, path: &str) -> Result<Value, Error> {
    path.split('.').try_fold(value, |value, name| match name.parse::<usize>() {
        Ok(index) => value.get_item(&Value::from(index)),
        Err(_) => value.get_attr(name),
    })
}

/// The filter and the method `replace`: replaces the first `count` occurrences, or all.
fn replace(run: &Run, text: &Value, from: &Value, to: &Value, count: Option<i64>) -> Result<String, Error> {
    let text = python::text(text, run)?;
    let from = python::text(&run.taint.plain(from), run)?;
    let to = python::text(to, run)?;
    let most = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let plain = run.taint.plain_text(&text);
    // The empty string occurs before, between and after all characters.
    let found = plain.matches(&from).count().min(most);
    check_len(text.len().saturating_add(found.saturating_mul(to.len())))?;
    let (mut out, mut tainted, mut end) = (String::new(), Cutter(&text), 0);
    for (at, _) in plain.match_indices(&from).take(most) {
        out.push_str(tainted.take(&plain[end..at]));
        out.push_str(&to);
        tainted.take(&from);
        end = at + from.len();
    }
    out.push_str(tainted.0);
    Ok(out)
}

/// The methods `split(sep, maxsplit)` and `rsplit(sep, maxsplit)`, with positional or named arguments.
fn split(run: &Run, text: &str, args: &[Value], right: bool) -> Result<Value, Error> {
    let (args, kwargs): (&[Value], Kwargs) = from_args(args)?;
    let separator = args.first().cloned().or(kwargs.get("sep")?).unwrap_or_default();
    let most = args.get(1).cloned().or(kwargs.get("maxsplit")?);
    kwargs.assert_all_used()?;
    let most = most.map(i64::try_from).transpose()?.and_then(|most| usize::try_from(most).ok());
    if separator.is_none() || separator.is_undefined() {
        return Ok(split_at_spaces(text, most, right));
    }
    let separator = python::text(&run.taint.plain(&separator), run)?;
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "split: the separator is empty"));
    }
    let plain = run.taint.plain_text(text);
    let pieces = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut pieces: Vec<&str> = match right {
        false => plain.splitn(pieces, &separator).collect(),
        true => plain.rsplitn(pieces, &separator).collect(),
    };
    if right {
        pieces.reverse();
    }
    let mut tainted = Cutter(text);
    let piece = |plain: &str| {
        let piece = tainted.take(plain);
        tainted.take(&separator);
        Value::from(piece)
    };
    Ok(pieces.into_iter().map(piece).collect())
}

/// The words of a string. After `most` cuts the rest stays whole.
fn split_at_spaces(text: &str, most: Option<usize>, right: bool) -> Value {
    let mut words = Vec::new();
    let mut rest = text.trim();
    while let (false, true) = (rest.is_empty(), most.is_none_or(|most| words.len() < most)) {
        let space = if right { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        let Some(at) = space else { break };
        let (left, after) = rest.split_at(at);
        let (word, others) =
            if right { (after.trim_start(), left.trim_end()) } else { (left, after.trim_start()) };
        words.push(word);
        rest = others;
    }
    // A string cut from one end keeps its white space at the other.
    if !rest.is_empty() {
        let at = rest.as_ptr() as usize - text.as_ptr() as usize;
        words.push(if most.is_none() {
            rest
        } else if right {
            &text[..at + rest.len()]
        } else {
            &text[at..]
        });
    }
    if right {
        words.reverse();
    }
    words.into_iter().map(Value::from).collect()
}

/// Which ends of a string are stripped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Both,
    Left,
    Right,
}

/// The string without the given characters at its ends.
fn strip<'t>(run: &Run, mut text: &'t str, characters: &str, ends: Ends) -> &'t str {
    let characters: Vec<char> = characters.chars().map(|c| run.taint.plain_char(c)).collect();
    let goes = |c: char| characters.contains(&run.taint.plain_char(c));
    if ends != Ends::Right {
        text = text.trim_start_matches(goes);
    }
    if ends != Ends::Left {
        text = text.trim_end_matches(goes);
    }
    text
}

/// The filter `trim`.
fn trim(run: &Run, text: &Value, characters: Option<&Value>) -> Result<String, Error> {
    let text = python::text(text, run)?;
    Ok(match characters.filter(|characters| !characters.is_none()) {
        Some(characters) => strip(run, &text, &python::text(characters, run)?, Ends::Both).to_owned(),
        None => text.trim().to_owned(),
    })
}

/// Whether a format contains a width of more than three digits, or takes one from its arguments.
fn has_wide_field(format: &str) -> bool {
    format.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 3) || format.contains("%*")
}

/// The filter `format`.
fn format(run: &Run, text: &Value, args: &[Value]) -> Result<Value, Error> {
    let format = python::text(text, run)?;
    check_len(if has_wide_field(&run.taint.plain_text(&format)) { usize::MAX } else { format.len() })?;
    let printf = |format: &str, args: &[Value]| {
        minijinja::formatting::format(FormatStyle::Printf, format, args).map(Value::from)
    };
    if !run.taint.is_tainted(text) {
        return printf(&format, &texts(run, args)?);
    }
    let all: Vec<Value> = [std::slice::from_ref(text), args].concat();
    run.taint.looking(&all, |all| printf(&python::text(&all[0], run)?, &all[1..]))
}

/// The filter `indent(width=4, first=false, blank=false)`: indents each line except the first and empty ones. The
/// width may be a string, which is then put before the lines.
fn indent(run: &Run, text: &Value, args: &[Value]) -> Result<String, Error> {
    let (args, kwargs): (&[Value], Kwargs) = from_args(args)?;
    let argument = |place: usize, name: &str| {
        let by_name = kwargs.get::<Option<Value>>(name)?;
        Ok::<_, Error>(args.get(place).cloned().or(by_name))
    };
    let width = argument(0, "width")?.unwrap_or_else(|| Value::from(4));
    let first = argument(1, "first")?.is_some_and(|value| value.is_true());
    let blank = argument(2, "blank")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let text = python::text(text, run)?;
    let lines = text.matches('\n').count() + 1;
    let len = |width: usize| check_len(text.len().saturating_add(lines.saturating_mul(width)));
    let before = match width.as_str() {
        Some(before) => before.to_owned(),
        None => {
            let width = usize::try_from(width)?;
            len(width)?;
            " ".repeat(width)
        }
    };
    len(before.len())?;
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&before);
        }
        out.push_str(line);
    }
    Ok(out)
}
