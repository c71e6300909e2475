//! Python's behaviour for values: printing, arithmetic, slices.

use std::fmt::Write as _;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::guard::{ITEM, Run};

/// The deepest nesting of printed values: a template can nest them without end, but the stack is finite.
const MAX_DEPTH: usize = 100;

/// The result of Python's `str`.
pub(super) fn text(value: &Value, run: &Run) -> Result<String, Error> {
    let mut out = String::new();
    write(value, run, &mut out)?;
    Ok(out)
}

/// Appends the result of Python's `str`.
pub(super) fn write(value: &Value, run: &Run, out: &mut String) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => push(text, run, out),
        None => write_nested(value, run, out, 0),
    }
}

fn write_nested(value: &Value, run: &Run, out: &mut String, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deep to be printed"));
    }
    let items = |open: &str, close: &str, out: &mut String, map: bool| {
        push(open, run, out)?;
        let mut count = 0;
        for item in value.try_iter()? {
            // Printing a small value takes more time than its bytes suggest.
            run.take(ITEM)?;
            if count > 0 {
                push(", ", run, out)?;
            }
            write_nested(&item, run, out, depth + 1)?;
            if map {
                push(": ", run, out)?;
                write_nested(&value.get_item(&item)?, run, out, depth + 1)?;
            }
            count += 1;
        }
        if count == 1 && open == "(" {
            push(",", run, out)?;
        }
        push(close, run, out)
    };
    match value.kind() {
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), run, out),
        ValueKind::Number if !value.is_integer() => push(&float(f64::try_from(value.clone())?), run, out),
        ValueKind::Seq if value.is_tuple() => items("(", ")", out, false),
        ValueKind::Seq | ValueKind::Iterable => items("[", "]", out, false),
        ValueKind::Map => items("{", "}", out, true),
        _ => push(&value.to_string(), run, out),
    }
}

fn push(text: &str, run: &Run, out: &mut String) -> Result<(), Error> {
    run.take(text.len())?;
    out.push_str(text);
    Ok(())
}

/// Appends a string as Python quotes it: in single quotes, unless it contains single but no double quotes.
fn quoted(text: &str, run: &Run, out: &mut String) -> Result<(), Error> {
    run.take(text.len() + 2)?;
    let has = |quote| text.chars().any(|c| run.taint.plain_char(c) == quote);
    let quote = if has('\'') && !has('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match run.taint.plain_char(c) {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            plain if plain == quote => out.extend(['\\', c]),
            plain if !is_printable(plain) => {
                let _ = match plain as u32 {
                    code @ ..0x100 => write!(out, "\\x{code:02x}"),
                    code @ 0x100..0x10000 => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                };
            }
            _ => out.push(c),
        }
    }
    out.push(quote);
    Ok(())
}

/// Whether Python prints a character as it is: not control, format or private-use characters, nor spaces other than
/// U+0020.
fn is_printable(c: char) -> bool {
    let hidden = matches!(c as u32,
        0x200b..=0x200f | 0x2028..=0x202e | 0x2060..=0x206f | 0xad | 0xfeff | 0xe000..=0xf8ff | 0xf0000..);
    !hidden && !c.is_control() && (c == ' ' || !c.is_whitespace())
}

/// A float as Python prints it: the shortest digits that are read back the same, with exponents such as `1e-05` and
/// `1e+16`.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let text = format!("{value:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// Applies an operator to two numbers; `None` if one is not a number.
pub(super) fn arithmetic(
    left: &Value,
    right: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Option<Result<Value, Error>> {
    let integer = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    };
    let number = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    };
    if let (Some(left), Some(right)) = (integer(left), integer(right)) {
        let result = integers(left, right).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidOperation,
                format!("the result is too large: operands {left} and {right}"),
            )
        });
        return Some(result.map(|n| i64::try_from(n).map_or_else(|_| Value::from(n), Value::from)));
    }
    Some(Ok(Value::from(floats(number(left)?, number(right)?))))
}

/// The indices of `[start:stop:step]` in a sequence of `len` elements.
pub(super) fn indices(
    (start, stop, step): (Option<i64>, Option<i64>, i64),
    len: usize,
) -> Result<impl Iterator<Item = usize>, Error> {
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "a slice's step cannot be zero"));
    }
    let len = len as i64;
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let bound = |index: Option<i64>, default: i64| match index {
        None => default,
        Some(index) if index < 0 => index.saturating_add(len).max(lowest),
        Some(index) => index.min(highest),
    };
    let (from, to) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
    let (start, stop) = (bound(start, from), bound(stop, to));
    let mut at = Some(start);
    Ok(std::iter::from_fn(move || {
        let index = at.filter(|&at| if step > 0 { at < stop } else { at > stop })?;
        at = index.checked_add(step);
        usize::try_from(index).ok()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(start: Option<i64>, stop: Option<i64>, step: i64) -> Vec<usize> {
        indices((start, stop, step), 5).unwrap().collect()
    }

    #[test]
    fn slices_pick_what_they_pick_in_python() {
        assert_eq!(picked(None, None, 1), [0, 1, 2, 3, 4]);
        assert_eq!(picked(Some(1), Some(-1), 2), [1, 3]);
        assert_eq!(picked(None, None, -1), [4, 3, 2, 1, 0]);
        assert_eq!(picked(Some(-2), None, -2), [3, 1]);
        assert_eq!(picked(Some(9), Some(-9), -3), [4, 1]);
        assert_eq!(picked(Some(-9), Some(9), 4), [0, 4]);
        assert_eq!(picked(Some(3), Some(1), 1), [0usize; 0]);
        assert_eq!(picked(Some(i64::MIN), Some(i64::MAX), i64::MAX), [0]);
        assert_eq!(indices((None, None, -1), 0).unwrap().count(), 0);
        assert!(indices((None, None, 0), 5).is_err());
    }

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        for (value, expected) in [
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.25e100, "-1.25e+100"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float(value), expected);
        }
    }
}
