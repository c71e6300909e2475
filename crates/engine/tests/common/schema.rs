//! Validates a value against a JSON schema, for the keywords that the tests use. Other keywords panic.

use serde_json::Value;

/// Checks a value against a part of `root`.
pub fn validate(root: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let fields = match schema {
        Value::Bool(true) => return Ok(()),
        Value::Object(fields) => fields,
        _ => return Err(format!("{value} is not allowed")),
    };
    let number = |key: &str| fields.get(key).and_then(Value::as_f64);
    for (keyword, wanted) in fields {
        let holds = match keyword.as_str() {
            "$defs" | "additionalProperties" | "items" => true,
            "$ref" => {
                let target = root.pointer(&wanted.as_str().unwrap()[1..]).unwrap();
                validate(root, target, value)?;
                true
            }
            "type" => match wanted {
                Value::Array(types) => types.iter().any(|name| is(name, value)),
                name => is(name, value),
            },
            "enum" => wanted.as_array().unwrap().contains(value),
            "const" => wanted == value,
            "anyOf" => choices(root, wanted, value) > 0,
            "oneOf" => choices(root, wanted, value) == 1,
            "minimum" => value.as_f64().is_none_or(|v| v >= number(keyword).unwrap()),
            "maximum" => value.as_f64().is_none_or(|v| v <= number(keyword).unwrap()),
            "multipleOf" => value.as_f64().is_none_or(|v| (v / number(keyword).unwrap()).fract() == 0.0),
            "maxLength" => {
                value.as_str().is_none_or(|v| v.chars().count() as f64 <= number(keyword).unwrap())
            }
            "minItems" => value.as_array().is_none_or(|v| v.len() as f64 >= number(keyword).unwrap()),
            "maxItems" => value.as_array().is_none_or(|v| v.len() as f64 <= number(keyword).unwrap()),
            "pattern" => value.as_str().is_none_or(|v| matches(wanted.as_str().unwrap(), v)),
            "format" => match wanted.as_str().unwrap() {
                "date" => matches("^[0-9]{4}-[01][0-9]-[0-3][0-9]$", value.as_str().unwrap()),
                "uuid" => {
                    matches("^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$", value.as_str().unwrap())
                }
                other => panic!("no format {other}"),
            },
            "required" => value.as_object().is_none_or(|v| {
                wanted.as_array().unwrap().iter().all(|name| v.contains_key(name.as_str().unwrap()))
            }),
            "properties" => {
                for (name, value) in value.as_object().into_iter().flatten() {
                    match wanted.get(name) {
                        Some(schema) => validate(root, schema, value)?,
                        None if fields.get("additionalProperties") == Some(&Value::Bool(false)) => {
                            return Err(format!("{name} is not a property"));
                        }
                        None => {}
                    }
                }
                true
            }
            "prefixItems" => {
                let prefix = wanted.as_array().unwrap();
                for (i, item) in value.as_array().into_iter().flatten().enumerate() {
                    let rest = fields.get("items").unwrap_or(&Value::Bool(true));
                    validate(root, prefix.get(i).unwrap_or(rest), item)?;
                }
                true
            }
            other => panic!("the tests know no {other}"),
        };
        if !holds {
            return Err(format!("{keyword} is not {wanted}"));
        }
    }
    if let (Some(schema), Some(items), None) =
        (fields.get("items"), value.as_array(), fields.get("prefixItems"))
    {
        items.iter().try_for_each(|item| validate(root, schema, item))?;
    }
    Ok(())
}

fn choices(root: &Value, schemas: &Value, value: &Value) -> usize {
    schemas.as_array().unwrap().iter().filter(|schema| validate(root, schema, value).is_ok()).count()
}

fn is(name: &Value, value: &Value) -> bool {
    match name.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.as_f64().is_some_and(|v| v.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("no type {other}"),
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    fancy_regex::Regex::new(pattern).unwrap().is_match(text).unwrap()
}
