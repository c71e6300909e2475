//! Features of Jinja that minijinja lacks or handles differently.

use std::sync::Arc;

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::guard::Run;
use super::python;
use super::texts::library;

/// Adds the filters, tests and functions.
pub(super) fn add(environment: &mut Environment, run: &Arc<Run>) {
    // Undefined values count as empty.
    for name in ["length", "count", "first", "last", "items"] {
        environment.add_filter(name, move |args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            match (name, args.first()) {
                ("length" | "count", Some(value)) if value.is_undefined() => Ok(Value::from(0)),
                ("items", Some(value)) if value.is_undefined() => Ok(Value::from(Vec::<Value>::new())),
                (_, Some(value)) if value.is_undefined() => Ok(Value::UNDEFINED),
                _ => library().empty_state().apply_filter(name, &args),
            }
        });
    }
    let taint = run.taint;
    environment.add_filter("sort", move |args: Rest<ValueOrKwargs>| {
        let args = sort_arguments(&args.into_values())?;
        taint.looking(&args, |args| library().empty_state().apply_filter("sort", args))
    });
    let own = Arc::clone(run);
    environment.add_filter("truncate", move |text: &Value, args: Rest<ValueOrKwargs>| {
        truncate(&own, text, &args.into_values())
    });
    let own = Arc::clone(run);
    environment.add_filter("wordcount", move |text: &Value| {
        let text = python::text(&own.taint.plain(text), &own)?;
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
        Ok::<usize, Error>(words.count())
    });
    environment.add_test("callable", is_callable);
    environment.add_function("dict", dict);
}

/// The arguments of `sort(reverse, case_sensitive, attribute)` by name.
fn sort_arguments(args: &[Value]) -> Result<Vec<Value>, Error> {
    let (args, kwargs): (&[Value], Kwargs) = from_args(args)?;
    let Some((value, by_place)) = args.split_first() else { return Ok(Vec::new()) };
    let names = ["reverse", "case_sensitive", "attribute"];
    let mut named: Vec<(String, Value)> = Vec::new();
    for name in kwargs.args() {
        named.push((name.to_owned(), kwargs.get(name)?));
    }
    named.extend(names.iter().map(|name| (*name).to_owned()).zip(by_place.iter().cloned()));
    Ok(vec![value.clone(), named.into_iter().collect::<Kwargs>().into()])
}

/// `truncate(length=255, killwords=false, end='...', leeway=5)`.
fn truncate(run: &Run, text: &Value, args: &[Value]) -> Result<String, Error> {
    let (args, kwargs): (&[Value], Kwargs) = from_args(args)?;
    let argument = |place: usize, name: &str| {
        let by_name = kwargs.get::<Option<Value>>(name)?;
        Ok::<_, Error>(args.get(place).cloned().or(by_name).filter(|value| !value.is_none()))
    };
    let length = argument(0, "length")?.map(usize::try_from).transpose()?.unwrap_or(255);
    let cuts_words = argument(1, "killwords")?.is_some_and(|value| value.is_true());
    let end = argument(2, "end")?.map(|end| python::text(&end, run)).transpose()?;
    let end = end.unwrap_or_else(|| "...".to_owned());
    let leeway = argument(3, "leeway")?.map(usize::try_from).transpose()?.unwrap_or(5);
    kwargs.assert_all_used()?;
    let text = python::text(text, run)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept = length.checked_sub(end.chars().count()).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, "truncate: the length is shorter than the end marker")
    })?;
    let mut kept: String = text.chars().take(kept).collect();
    if !cuts_words && let Some(space) = kept.rfind(' ') {
        kept.truncate(space);
    }
    Ok(kept + &end)
}

/// Whether a value can be called. An undefined value can: the call reports that it is undefined.
fn is_callable(value: &Value) -> bool {
    let has_call = |name: &str| ["Macro", "Loop"].iter().any(|kind| name.ends_with(kind));
    value.is_undefined()
        || value
            .as_object()
            .is_some_and(|object| object.repr() == ObjectRepr::Plain || has_call(object.type_name()))
}

/// `dict(mapping or pairs, name=value…)`.
fn dict(value: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut pairs: Vec<(Value, Value)> = Vec::new();
    match &value {
        None => {}
        Some(value) if value.is_undefined() => {}
        Some(map) if map.kind() == ValueKind::Map => {
            for key in map.try_iter()? {
                let item = map.get_item(&key)?;
                pairs.push((key, item));
            }
        }
        Some(list) => {
            for pair in list.try_iter()? {
                let pair: Vec<Value> = pair.try_iter()?.collect();
                let [key, item] = <[Value; 2]>::try_from(pair)
                    .map_err(|_| Error::new(ErrorKind::InvalidOperation, "dict takes a list of pairs"))?;
                pairs.push((key, item));
            }
        }
    }
    for name in kwargs.args() {
        pairs.push((Value::from(name), kwargs.get(name)?));
    }
    Ok(Value::from_pairs(pairs))
}

/// Names of methods that are attributes, as in `x.keys is defined`. `x['keys']` finds a map's own key of that name.
const METHODS: [(ValueKind, &[&str]); 2] = [
    (ValueKind::Map, &["get", "items", "keys", "values"]),
    (
        ValueKind::String,
        &[
            "capitalize",
            "count",
            "endswith",
            "find",
            "format",
            "join",
            "lower",
            "lstrip",
            "replace",
            "rfind",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
            "startswith",
            "strip",
            "title",
            "upper",
        ],
    ),
];

/// Whether an attribute may be a method.
pub(super) fn may_be_method(name: &str) -> bool {
    METHODS.iter().any(|(_, names)| names.contains(&name))
}

/// The method of a value with this name, if there is one.
pub(super) fn bound_method(value: &Value, name: &str) -> Option<Value> {
    let has = METHODS.iter().any(|(kind, names)| *kind == value.kind() && names.contains(&name));
    let is_namespace = value.as_object().is_some_and(|object| object.type_name().ends_with("Namespace"));
    (has && !is_namespace)
        .then(|| Value::from_object(BoundMethod { value: value.clone(), name: name.to_owned() }))
}

#[derive(Debug)]
struct BoundMethod {
    value: Value,
    name: String,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        self.value.call_method(state, &self.name, args)
    }
}

/// The source without unary plus, which changes nothing: `+1` is `1`. The library does not support it.
pub(super) fn without_unary_plus(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    // Expressions are between these; text outside is copied.
    while let Some((open, close)) = [("{{", "}}"), ("{%", "%}"), ("{#", "#}")]
        .into_iter()
        .filter_map(|pair| Some((rest.find(pair.0)?, pair.1)))
        .min()
    {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        let len = if close == "#}" {
            tag.find(close).unwrap_or(tag.len())
        } else {
            expression(tag, close, &mut out)
        };
        if close == "#}" {
            out.push_str(&tag[..len]);
        }
        rest = &tag[len..];
    }
    out.push_str(rest);
    out
}

/// Copies an expression up to `close` without unary plus, and returns its length.
fn expression(tag: &str, close: &str, out: &mut String) -> usize {
    const BEFORE_VALUES: [&str; 14] =
        ["and", "elif", "else", "if", "in", "is", "not", "or", "print", "return", "set", "call", "do", "for"];
    let mut quote: Option<char> = None;
    let mut escaped = false;
    // The previous word or sign; empty at the start of the expression.
    let (mut word, mut value_before) = (String::new(), false);
    // Signs right after the opening control white space.
    let mut start = true;
    for (at, c) in tag.char_indices() {
        if let Some(open) = quote {
            if c == open && !escaped {
                quote = None;
            }
            escaped = c == '\\' && !escaped;
            out.push(c);
            continue;
        }
        if tag[at..].starts_with(close) {
            return at;
        }
        if c.is_alphanumeric() || c == '_' {
            word.push(c);
        } else {
            if !word.is_empty() {
                value_before = !BEFORE_VALUES.contains(&&*word);
                word.clear();
            }
            match c {
                '"' | '\'' => {
                    (quote, escaped, value_before) = (Some(c), false, true);
                }
                '+' if !start && !value_before && !tag[at + 1..].starts_with(close) => {
                    out.push(' ');
                    continue;
                }
                ')' | ']' | '}' => value_before = true,
                c if c.is_whitespace() => {}
                _ => value_before = false,
            }
        }
        start = false;
        out.push(c);
    }
    tag.len()
}
