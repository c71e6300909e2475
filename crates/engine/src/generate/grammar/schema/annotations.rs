//! Removes annotations from a JSON schema: keywords that do not constrain the answer. The compiler refuses every
//! keyword that it does not enforce, even if there is nothing to enforce.

use serde_json::{Map, Value, json};

/// String formats that allow any string.
const ANY_TEXT: [&str; 5] = ["password", "binary", "path", "file-path", "directory-path"];

/// Number formats, and the pattern of strings with such a format, because libraries write large integers as strings.
/// For a number, the format only tells how to store it.
const NUMERIC: [(&str, &str); 8] = [
    ("int32", "^-?[0-9]{1,10}$"),
    ("int64", "^-?[0-9]{1,19}$"),
    ("uint32", "^[0-9]{1,10}$"),
    ("uint64", "^[0-9]{1,20}$"),
    ("int16", "^-?[0-9]{1,5}$"),
    ("uint16", "^[0-9]{1,5}$"),
    ("float", DECIMAL),
    ("double", DECIMAL),
];

const DECIMAL: &str = r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$";

/// Patterns with a look-ahead, which the compiler does not support, and equivalent ones without.
const WITHOUT_LOOK_AHEAD: [(&str, &str); 1] = [
    // Pydantic's decimal numbers: the look-ahead demands a digit.
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"),
];

/// Limits that are integers, which some libraries write with a decimal point.
const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// The schema without annotations.
pub fn without_annotations(schema: &Value) -> Value {
    let mut schema = schema.clone();
    simplify(&mut schema);
    schema
}

/// A Lark grammar with annotations removed from its [embedded](super::embedded) schemas.
pub fn without_embedded_annotations(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("%json") {
        let (before, after) = rest.split_at(at + "%json".len());
        plain.push_str(before);
        rest = after;
        let mut schemas = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        if let Some(Ok(schema @ Value::Object(_))) = schemas.next() {
            plain.push(' ');
            plain.push_str(&without_annotations(&schema).to_string());
            rest = &after[schemas.byte_offset()..];
        }
    }
    plain + rest
}

fn simplify(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    fields.retain(|name, value| constrains(name, value));
    simplify_format(fields);
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().for_each(simplify);
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(simplify);
            }
            ("items" | "additionalProperties" | "additionalItems", value) => simplify(value),
            ("pattern", Value::String(pattern)) => {
                if let Some((_, same)) = WITHOUT_LOOK_AHEAD.iter().find(|(known, _)| known == pattern) {
                    *pattern = (*same).to_owned();
                }
            }
            (name, Value::Number(number)) if COUNTS.contains(&name) => {
                if let Some(count) = number.as_f64().filter(|n| *n >= 0.0 && n.fract() == 0.0 && *n < 1e15) {
                    *number = (count as u64).into();
                }
            }
            _ => {}
        }
    }
}

/// Whether a keyword may constrain the answer. Unknown keywords may.
fn constrains(name: &str, value: &Value) -> bool {
    let allows_all = *value == Value::Bool(true) || *value == json!({});
    match name {
        "uniqueItems" => *value != Value::Bool(false),
        "unevaluatedProperties" | "unevaluatedItems" => !allows_all,
        // Property names are strings anyway.
        "propertyNames" => !allows_all && *value != json!({ "type": "string" }),
        "dependencies" | "dependentRequired" | "dependentSchemas" => *value != json!({}),
        _ => true,
    }
}

fn simplify_format(fields: &mut Map<String, Value>) {
    let Some(format) = fields.get("format").and_then(Value::as_str) else { return };
    if ANY_TEXT.contains(&format) {
        fields.remove("format");
    } else if let Some((_, pattern)) = NUMERIC.iter().find(|(known, _)| *known == format) {
        if !allows_text(fields.get("type")) {
            fields.remove("format");
        } else if !fields.contains_key("pattern") {
            fields.remove("format");
            fields.insert("pattern".into(), (*pattern).into());
        }
    }
}

/// Whether a type is named, and is or includes strings.
fn allows_text(kind: Option<&Value>) -> bool {
    match kind {
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        Some(kind) => kind == "string",
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_constrains_nothing_is_taken_away_wherever_there_is_a_schema() {
        let noise = json!({ "type": "array", "uniqueItems": false, "items": { "format": "password" } });
        let plain = json!({ "type": "array", "items": {} });
        for (schema, expected) in [
            (json!({ "properties": { "format": noise } }), json!({ "properties": { "format": plain } })),
            (json!({ "anyOf": [noise, true] }), json!({ "anyOf": [plain, true] })),
            (json!({ "$defs": { "a": noise } }), json!({ "$defs": { "a": plain } })),
            (json!({ "additionalProperties": noise }), json!({ "additionalProperties": plain })),
            // Values are not schemas.
            (json!({ "enum": [noise], "const": noise }), json!({ "enum": [noise], "const": noise })),
            (json!({ "type": "integer", "format": "int64" }), json!({ "type": "integer" })),
            (json!({ "format": "int64" }), json!({})),
            (
                json!({ "type": ["string", "null"], "format": "int64" }),
                json!({ "type": ["string", "null"], "pattern": "^-?[0-9]{1,19}$" }),
            ),
            (json!({ "propertyNames": { "type": "string" }, "dependentRequired": {} }), json!({})),
            (json!({ "minLength": 2.0, "minimum": 2.0 }), json!({ "minLength": 2, "minimum": 2.0 })),
        ] {
            assert_eq!(without_annotations(&schema), expected, "{schema}");
        }
        for constrains in [
            json!({ "uniqueItems": true }),
            json!({ "format": "colour" }),
            json!({ "type": "string", "format": "int64", "pattern": "^7" }),
            json!({ "propertyNames": { "pattern": "^a" } }),
            json!({ "unevaluatedProperties": false }),
            json!({ "minLength": 2.5 }),
        ] {
            assert_eq!(without_annotations(&constrains), constrains);
        }
    }

    #[test]
    fn schemas_in_grammars_are_treated_alike() {
        let source = r#"start: "%json" a | %json {"type":"array","uniqueItems":false}
a: %json{ "x": 1 } "b""#;
        let plain = without_embedded_annotations(source);
        assert_eq!(plain, "start: \"%json\" a | %json {\"type\":\"array\"}\na: %json {\"x\":1} \"b\"");
    }
}
