//! The `tojson` filter as chat templates expect it: Python's `json.dumps` with `ensure_ascii=False`.
//!
//! Models are trained on tools and arguments in exactly this format. Jinja's own filter is meant for web pages and
//! escapes `<`, `>`, `&` and `'`.
//! web pages, escapes `<`, `>`, `&` and `'`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python;
use super::taint::Taint;

/// The filter `value | tojson(ensure_ascii, indent, separators, sort_keys)`; all arguments are named.
pub(super) fn tojson(value: &Value, kwargs: Kwargs, taint: Taint) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => Some(match v.as_str() {
            Some(unit) => unit.to_owned(),
            None => " ".repeat(usize::try_from(v)?.min(MAX_INDENT)),
        }),
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let mut writer = Writer {
        taint,
        out: String::new(),
        depth: 0,
        between_items: if indent.is_some() { "," } else { ", " }.to_owned(),
        after_key: ": ".to_owned(),
        indent,
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    if let Some(separators) = separators {
        let [between_items, after_key] = <[String; 2]>::try_from(separators)
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings"))?;
        writer.between_items = between_items;
        writer.after_key = after_key;
    }
    kwargs.assert_all_used()?;
    writer.value(value)?;
    Ok(Value::from(writer.out))
}

/// The largest indentation given as a number.
const MAX_INDENT: usize = 64;

/// The longest text in bytes: a template can build small values that print without end.
const MAX_LEN: usize = 64 << 20;

/// The deepest nesting of values: a template can nest them without end, but the stack is finite.
const MAX_DEPTH: usize = 200;

struct Writer {
    taint: Taint,
    out: String,
    depth: usize,
    between_items: String,
    after_key: String,
    /// One step of indentation; `None` prints on one line.
    indent: Option<String>,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Writer {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        if self.out.len() > MAX_LEN {
            return Err(Error::new(ErrorKind::BadSerialization, "a value is too long for JSON"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container('[', &items, ']', Writer::value)?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort_by_cached_key(|key| self.taint.plain(key));
                }
                self.container('{', &keys, '}', |writer, key| {
                    writer.key(key)?;
                    writer.out.push_str(&writer.after_key.clone());
                    writer.value(&value.get_item(key)?)
                })?;
            }
            kind => {
                let message = format!("a value of type {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    /// Like Python, writes a key that is not a string as the string of its JSON.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        if key.kind() == ValueKind::String {
            return self.value(key);
        }
        self.out.push('"');
        self.value(key)?;
        self.out.push('"');
        Ok(())
    }

    fn container(
        &mut self,
        open: char,
        items: &[Value],
        close: char,
        write: impl Fn(&mut Writer, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.depth == MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "a value is nested too deep for JSON"));
        }
        self.out.push(open);
        self.depth += 1;
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.between_items);
            }
            self.new_line();
            write(self, item)?;
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.new_line();
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self) {
        if let Some(unit) = &self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(unit.as_str(), self.depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            let plain = self.taint.plain_char(c);
            let escape = match plain {
                '"' => "\\\"".to_owned(),
                '\\' => "\\\\".to_owned(),
                '\n' => "\\n".to_owned(),
                '\r' => "\\r".to_owned(),
                '\t' => "\\t".to_owned(),
                '\u{8}' => "\\b".to_owned(),
                '\u{c}' => "\\f".to_owned(),
                plain if plain < ' ' || (self.ensure_ascii && !plain.is_ascii()) => {
                    let units = plain.encode_utf16(&mut [0; 2]).to_vec();
                    units.iter().map(|unit| format!("\\u{unit:04x}")).collect()
                }
                _ => {
                    self.out.push(c);
                    continue;
                }
            };
            if self.taint.is_tainted_char(c) {
                self.out.push_str(&self.taint.taint_text(&escape));
            } else {
                self.out.push_str(&escape);
            }
        }
        self.out.push('"');
    }
}

/// A float as `json.dumps` writes it.
fn float(value: f64) -> String {
    match value {
        v if v.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        v => python::float(v),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(expression: &str) -> String {
        let mut environment = minijinja::Environment::new();
        let taint = Taint::new(&Default::default()).unwrap();
        environment.add_filter("tojson", move |value: &Value, kwargs: Kwargs| tojson(value, kwargs, taint));
        environment.render_str(expression, ()).unwrap_or_else(|e| format!("error: {e}"))
    }

    #[test]
    fn values_are_spelled_as_python_spells_them() {
        for (template, expected) in [
            (
                r#"{{ {"a": [1, 2.0, true, none], "b": {}, "c": []}|tojson }}"#,
                r#"{"a": [1, 2.0, true, null], "b": {}, "c": []}"#,
            ),
            (r#"{{ "<é>&'\n\t\"\\"|tojson }}"#, r#""<é>&'\n\t\"\\""#),
            (r#"{{ "é🦙"|tojson(ensure_ascii=true) }}"#, r#""\u00e9\ud83e\udd99""#),
            (r#"{{ [1, [2]]|tojson(indent=2) }}"#, "[\n  1,\n  [\n    2\n  ]\n]"),
            (r#"{{ {"b": 1, "a": 2}|tojson(sort_keys=true) }}"#, r#"{"a": 2, "b": 1}"#),
            (r#"{{ {"b": [1, 2]}|tojson(separators=(",", ":")) }}"#, r#"{"b":[1,2]}"#),
            (r#"{{ {1: 2, false: 3}|tojson }}"#, r#"{"1": 2, "false": 3}"#),
        ] {
            assert_eq!(rendered(template), expected, "{template}");
        }
    }

    #[test]
    fn what_is_not_json_is_an_error() {
        assert!(rendered("{{ nothing|tojson }}").starts_with("error:"));
        let deep = "{% set ns = namespace(x=1) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}\
                    {{ ns.x|tojson }}";
        assert!(rendered(deep).contains("too deep"));
    }
}
