//! Checks of a JSON schema before it is compiled, and precise errors when compilation fails.

mod annotations;

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, Result};
pub use annotations::{without_annotations, without_embedded_annotations};

/// The deepest nesting that is accepted.
const DEEPEST: usize = 100;

/// The most parts that are accepted. References between parts may form a long chain, which takes stack.
const MOST_PARTS: usize = 20_000;

/// The most different references, for the same reason.
const MOST_REFERENCES: usize = 500;

/// The compiler recognises multiples of a number by their remainder. Each possible remainder costs time and memory.
const MOST_REMAINDERS: f64 = 10_000.0;

/// The most parts that are compiled, over all trials, to find out which part of a schema is wrong. After [`LONGEST_SEARCH`]
/// no new trial starts. So refusing a schema costs about as much as accepting it.
const MOST_TRIED: usize = 20_000;
const LONGEST_SEARCH: Duration = Duration::from_secs(2);

/// Refuses schemas that take too long to compile.
pub fn check(schema: &Value) -> Result<()> {
    if !schema.is_object() && *schema != Value::Bool(true) {
        return Err(Error::Invalid(format!("the JSON schema is {}, but must be an object", kind(schema))));
    }
    let mut parts = 0;
    let mut remainders = 1.0;
    let mut references = std::collections::BTreeSet::new();
    let mut left = vec![(schema, 1)];
    while let Some((value, depth)) = left.pop() {
        parts += 1;
        if depth > DEEPEST || parts > MOST_PARTS {
            return Err(Error::Invalid(format!(
                "the JSON schema is too large: it has at most {MOST_PARTS} parts, nested {DEEPEST} deep"
            )));
        }
        match value {
            Value::Array(items) => left.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(fields) => {
                for (name, value) in fields {
                    match (name.as_str(), value) {
                        ("$ref", Value::String(reference)) => {
                            references.insert(reference);
                        }
                        ("multipleOf", Value::Number(number)) => remainders *= multiplier(number),
                        _ => left.push((value, depth + 1)),
                    }
                }
            }
            _ => {}
        }
    }
    if references.len() > MOST_REFERENCES {
        return Err(Error::Invalid(format!(
            "the JSON schema has {} different references, more than {MOST_REFERENCES}",
            references.len()
        )));
    }
    if remainders > MOST_REMAINDERS {
        return Err(Error::Invalid(format!(
            "the JSON schema has a multipleOf that is too large: all of them together, multiplied and without their \
             decimal points, are at most {MOST_REMAINDERS}"
        )));
    }
    Ok(())
}

/// The schemas in a Lark grammar. Anything that is not JSON is skipped: it is inside a string, or the compiler reports
/// it.
pub fn embedded(source: &str) -> impl Iterator<Item = Value> {
    source.match_indices("%json").filter_map(|(at, keyword)| {
        let rest = &source[at + keyword.len()..];
        serde_json::Deserializer::from_str(rest).into_iter().next()?.ok().filter(Value::is_object)
    })
}

/// The schema as an object, without annotations.
pub fn object(schema: &Value) -> Value {
    if schema.is_object() { without_annotations(schema) } else { json!({}) }
}

/// The error for a refused schema. It names the smallest part that is refused with the same message when compiled
/// alone.
pub fn refusal(schema: &Value, message: &str, error: impl Fn(&Value) -> Option<String>) -> Error {
    let definitions: Vec<(&String, &Value)> =
        schema.as_object().into_iter().flatten().filter(|(name, _)| is_definitions(name)).collect();
    let defined: usize = definitions.iter().map(|(_, value)| parts(value)).sum();
    let start = Instant::now();
    let mut place = String::from("#");
    let mut part = schema;
    let mut tried = 0;
    'deeper: loop {
        for (name, child) in children(part) {
            tried += parts(child) + defined;
            if tried > MOST_TRIED || start.elapsed() > LONGEST_SEARCH {
                break 'deeper;
            }
            let mut alone = child.clone();
            if let Value::Object(fields) = &mut alone {
                for (name, value) in &definitions {
                    fields.entry(name.as_str()).or_insert_with(|| (*value).clone());
                }
            }
            if error(&alone).as_deref() == Some(message) {
                place += &format!("/{name}");
                part = child;
                continue 'deeper;
            }
        }
        break;
    }
    Error::Invalid(format!("the JSON schema at {place}: {}", in_our_words(message)))
}

/// The number of values in a JSON value, itself included.
fn parts(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(parts).sum(),
        Value::Object(fields) => fields.values().map(parts).sum(),
        _ => 0,
    }
}

/// The direct subschemas of a schema, and their paths.
fn children(schema: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (name, value) in schema.as_object().into_iter().flatten() {
        match (name.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                let schemas = schemas.iter().filter(|(_, schema)| schema.is_object());
                found.extend(schemas.map(|(key, schema)| (format!("{name}/{key}"), schema)));
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                let schemas = schemas.iter().enumerate().filter(|(_, schema)| schema.is_object());
                found.extend(schemas.map(|(i, schema)| (format!("{name}/{i}"), schema)));
            }
            ("items" | "additionalProperties" | "additionalItems", Value::Object(_)) => {
                found.push((name.clone(), value));
            }
            _ => {}
        }
    }
    found
}

fn is_definitions(name: &str) -> bool {
    matches!(name, "$defs" | "definitions")
}

/// The number's digits without the decimal point: 25 for 0.25.
fn multiplier(number: &serde_json::Number) -> f64 {
    let text = number.to_string();
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    // Digits that do not fit a number are too large anyway.
    let digits: f64 = digits.parse().unwrap_or(f64::INFINITY);
    if text.contains(['e', 'E']) { f64::INFINITY } else { digits.max(1.0) }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Replaces messages of the compiler that speak of its own options.
fn in_our_words(message: &str) -> String {
    if message.starts_with("oneOf constraints") {
        return "the choices of oneOf may overlap, which is not supported: give them a const field that tells them apart, \
                or use anyOf"
            .into();
    }
    if let Some(("Only absolute $ref's", reference)) = message
        .split_once(" (#/...) are supported")
        .and_then(|(start, rest)| Some((start, rest.split('\'').nth(3)?)))
    {
        return format!("$ref {reference}: only references into the schema itself, #/…, are supported");
    }
    if let Some(keys) = message.strip_prefix("Unimplemented keys: ") {
        return format!("not supported: {}", keys.trim_matches(['[', ']']));
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn looking_for_what_is_wrong_compiles_little() {
        let compiled = Cell::new(0);
        let names = |count: usize| (0..count).map(|i| format!("p{i}"));
        let object = |count, value: &Value| {
            let fields: serde_json::Map<_, _> = names(count).map(|name| (name, value.clone())).collect();
            json!({ "type": "object", "properties": fields })
        };
        let mut schema = object(400, &object(10, &json!({ "type": "string" })));
        schema["$defs"] = json!({ "d": object(400, &json!({ "type": "integer" })) });
        // As if the whole schema were wrong, and each of its parts correct.
        let error = refusal(&schema, "wrong", |part| {
            compiled.set(compiled.get() + parts(part));
            None
        });
        assert!(error.to_string().contains("at #: wrong"), "{error}");
        assert!((1..=MOST_TRIED).contains(&compiled.get()), "{} parts were compiled", compiled.get());

        let wrong = |part: &Value| part.to_string().contains("bad").then(|| "wrong".to_owned());
        let mut schema = object(100, &json!({ "type": "string" }));
        schema["properties"]["p70"] = json!({ "items": { "type": "bad" } });
        let error = refusal(&schema, "wrong", wrong);
        assert!(error.to_string().contains("at #/properties/p70/items: wrong"), "{error}");
    }
}
