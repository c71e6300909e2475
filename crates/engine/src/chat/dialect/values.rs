//! Converts arguments that a model writes as text to JSON, by the types in a tool's schema.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use super::input::trim;
use super::pythonic;

/// The parameters of the tools that a model may call. Clones share one table, so that each choice of a request does
/// not need its own.
#[derive(Clone, Debug, Default)]
pub(super) struct Tools(Arc<HashMap<String, Signature>>);

/// The parameter types of a tool.
#[derive(Debug)]
struct Signature {
    /// The types of each declared parameter.
    properties: HashMap<String, Kinds>,
    /// The types of all other parameters.
    others: Kinds,
}

impl Tools {
    /// The tools of a request: functions in OpenAI's format, or objects with a name.
    pub(super) fn new(tools: &[Value]) -> Tools {
        let signatures =
            tools.iter().filter_map(|tool| Some((name(tool)?.to_owned(), Signature::new(parameters(tool)))));
        Tools(Arc::new(signatures.collect()))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn knows(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The types of a tool's parameter.
    pub(super) fn kinds(&self, tool: &str, parameter: &str) -> Kinds {
        let Some(signature) = self.0.get(tool) else { return Kinds::default() };
        signature.properties.get(parameter).copied().unwrap_or(signature.others)
    }
}

impl Signature {
    /// The types in the schema of a tool's parameters.
    fn new(schema: &Value) -> Signature {
        let kinds = |property: &Value| Kinds::of(property, schema);
        let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
        Signature {
            properties: properties.map(|(name, property)| (name.clone(), kinds(property))).collect(),
            others: schema.get("additionalProperties").map(kinds).unwrap_or_default(),
        }
    }
}

/// A tool's name.
pub(super) fn name(tool: &Value) -> Option<&str> {
    function(tool).get("name")?.as_str().filter(|name| !name.is_empty())
}

/// The schema of a tool's parameters; null if it has none.
pub(super) fn parameters(tool: &Value) -> &Value {
    let function = function(tool);
    function.get("parameters").or_else(|| function.get("input_schema")).unwrap_or(&Value::Null)
}

fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

/// The types that a schema allows for a value. None at all: the schema does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kinds(u8);

const NULL: u8 = 1;
const BOOLEAN: u8 = 2;
const INTEGER: u8 = 4;
const NUMBER: u8 = 8;
const ARRAY: u8 = 16;
const OBJECT: u8 = 32;
const STRING: u8 = 64;

/// How many schemas and values are examined to find one parameter's types.
const MOST_STEPS: usize = 256;

/// How a value is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// As a string that is emitted as it arrives.
    Text,
    /// As a string, unless it is null.
    TextOrNull,
    /// Once all of it has arrived.
    Whole,
}

impl Kinds {
    /// Strings only.
    pub(super) const TEXT: Kinds = Kinds(STRING);

    /// The types that a schema inside `root` allows.
    fn of(schema: &Value, root: &Value) -> Kinds {
        let mut kinds = 0;
        let mut schemas = VecDeque::from([schema]);
        // References may be circular, and many properties may refer to one large schema.
        let mut steps = MOST_STEPS;
        while let Some(schema) = schemas.pop_front().filter(|_| steps > 0) {
            steps -= 1;
            if schema.get("nullable") == Some(&Value::Bool(true)) {
                kinds |= NULL;
            }
            match schema.get("type") {
                Some(Value::String(kind)) => kinds |= kind_named(kind),
                Some(Value::Array(names)) => {
                    for name in names.iter().take(steps) {
                        kinds |= name.as_str().map_or(0, kind_named);
                        steps -= 1;
                    }
                }
                Some(_) => {}
                None => {
                    let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
                    for value in values.chain(schema.get("const")).take(steps) {
                        kinds |= kind_of(value);
                        steps -= 1;
                    }
                }
            }
            for key in ["anyOf", "oneOf", "allOf"] {
                let members = schema.get(key).and_then(Value::as_array).into_iter().flatten();
                schemas.extend(members.take(steps.saturating_sub(schemas.len())));
            }
            let place = schema.get("$ref").and_then(Value::as_str).and_then(|place| place.strip_prefix('#'));
            schemas.extend(place.and_then(|place| root.pointer(place)));
        }
        Kinds(kinds)
    }

    pub(super) fn reading(self) -> Reading {
        match self.0 {
            STRING => Reading::Text,
            _ if self.0 == STRING | NULL => Reading::TextOrNull,
            _ => Reading::Whole,
        }
    }

    /// Whether a string is allowed, or nothing is known.
    pub(super) fn may_be_text(self) -> bool {
        self.0 == 0 || self.0 & STRING != 0
    }

    /// The JSON of a text. If it does not match the schema, it is taken as JSON if it is valid, otherwise as a
    /// string.
    pub(super) fn json(self, text: &str) -> String {
        let value = trim(text);
        // Templates print values in Python's syntax, and so do models.
        let plain = match value {
            "True" | "TRUE" => "true",
            "False" | "FALSE" => "false",
            "None" => "null",
            other => other,
        };
        // Without a type in the schema, Python's words are strings.
        let value = if self.0 & (BOOLEAN | NULL) == 0 { value } else { plain };
        let is_json = |text: &str| serde_json::from_str::<&RawValue>(text).is_ok();
        let literal = if self.0 & (ARRAY | OBJECT) == 0 || is_json(value) {
            None
        } else {
            pythonic::json(value).filter(|json| is_json(json))
        };
        let value = literal.as_deref().unwrap_or(value);
        let parsed = serde_json::from_str::<&RawValue>(value).ok().map(RawValue::get);
        let kind = parsed.map_or(0, json_kind);
        let fits = match self.0 {
            0 => kind != STRING,
            _ if self.0 & kind != 0 => kind != STRING,
            // A number such as 3.0 is an integer too.
            _ => self.0 & STRING == 0,
        };
        match parsed {
            Some(json) if fits => json.to_owned(),
            _ if value.is_empty() && self.0 & NULL != 0 && self.0 & STRING == 0 => "null".into(),
            _ => quoted(text),
        }
    }
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A part of a text, for the inside of a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let mut quoted = quoted(text);
    quoted.pop();
    quoted.remove(0);
    quoted
}

fn kind_named(name: &str) -> u8 {
    match name {
        "null" => NULL,
        "boolean" => BOOLEAN,
        "integer" => INTEGER,
        "number" => NUMBER,
        "array" => ARRAY,
        "object" => OBJECT,
        "string" => STRING,
        _ => 0,
    }
}

fn kind_of(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(_) => INTEGER | NUMBER,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
        Value::String(_) => STRING,
    }
}

/// The type of a valid JSON text.
fn json_kind(json: &str) -> u8 {
    match json.as_bytes().first() {
        Some(b'n') => NULL,
        Some(b't' | b'f') => BOOLEAN,
        Some(b'[') => ARRAY,
        Some(b'{') => OBJECT,
        Some(b'"') => STRING,
        _ => INTEGER | NUMBER,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn clones_share_the_table_of_tools() {
        let zeros = vec![0; 1000];
        let tool = json!({ "name": "f", "parameters": { "properties": { "a": { "enum": zeros } } } });
        let tools = Tools::new(&[tool]);
        assert!(Arc::ptr_eq(&tools.0, &tools.clone().0));
        assert_eq!(tools.kinds("f", "a"), Kinds(INTEGER | NUMBER));
    }

    #[test]
    fn circular_schemas_are_read_in_bounded_steps() {
        let cycles = vec![json!({ "$ref": "#/properties/a" }); 100];
        let schema = json!({
            "properties": {
                "a": { "oneOf": cycles, "nullable": true, "allOf": [{ "type": "string" }] },
                "b": { "anyOf": [{ "$ref": "#/properties/a" }, { "type": ["integer", "number"] }] },
            },
            "additionalProperties": { "const": true },
        });
        let tools = Tools::new(&[json!({ "name": "f", "parameters": schema })]);
        assert_eq!(tools.kinds("f", "a"), Kinds(NULL | STRING));
        assert_eq!(tools.kinds("f", "b"), Kinds(NULL | STRING | INTEGER | NUMBER));
        assert_eq!(tools.kinds("f", "c"), Kinds(BOOLEAN));
    }
}
