//! JSON settings as metadata: `{"rope_parameters": {"rope_theta": 1e6}}` becomes `rope_parameters.rope_theta`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::{Metadata, NumberArray, NumberKind, Quoted, StringArray, Value, foreign};
use crate::error::{Error, Result};

/// The largest settings file. Usual ones have a few kilobytes; those with an entry for each layer, a few hundred.
pub const MAX_BYTES: u64 = 4 << 20;

/// Reads a settings file.
///
/// # Errors
/// If it cannot be read, is too long, or is not a JSON object.
pub fn read_object(path: &Path) -> Result<Map<String, Json>> {
    let file = File::open(path).map_err(|e| Error::io(path, "cannot open", e))?;
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(|e| Error::io(path, "cannot read", e))?;
    parse_object(path, &text)
}

/// Parses an object; `path` is only used in messages.
///
/// # Errors
/// If it is too long or not a JSON object.
pub fn parse_object(path: &Path, text: &[u8]) -> Result<Map<String, Json>> {
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::format(
            path,
            format!("it has more than {MAX_BYTES} bytes, too many for a settings file"),
        ));
    }
    serde_json::from_slice(text).map_err(|e| {
        let reason = match foreign::recognise(text) {
            Some(what) => format!("it looks like {what}"),
            None if e.is_eof() => format!("{}; {}", Quoted(&e.to_string()), foreign::CUT_SHORT),
            None => Quoted(&e.to_string()).to_string(),
        };
        Error::format(path, format!("it is not a JSON object: {reason}"))
    })
}

/// Adds an object's values to the metadata, under keys with this prefix.
///
/// # Errors
/// If a key exists already.
pub fn add_object(
    metadata: &mut Metadata,
    path: &Path,
    prefix: &str,
    object: Map<String, Json>,
) -> Result<()> {
    for (key, value) in object {
        add(metadata, path, format!("{prefix}{key}"), value)?;
    }
    Ok(())
}

fn add(metadata: &mut Metadata, path: &Path, key: String, value: Json) -> Result<()> {
    let value = match value {
        // Null counts as absent.
        Json::Null => return Ok(()),
        Json::Object(object) => return add_object(metadata, path, &format!("{key}."), object),
        Json::Array(values) => match list(&values) {
            Some(list) => list,
            None => {
                for (i, value) in values.into_iter().enumerate() {
                    add(metadata, path, format!("{key}.{i}"), value)?;
                }
                return Ok(());
            }
        },
        Json::Bool(v) => Value::Bool(v),
        Json::String(v) => Value::String(v),
        Json::Number(n) => match (n.as_u64(), n.as_i64()) {
            (Some(v), _) => Value::Unsigned(v),
            (None, Some(v)) => Value::Signed(v),
            (None, None) => Value::Float(n.as_f64().unwrap_or(f64::NAN)),
        },
    };
    metadata
        .insert(key, value)
        .map_err(|(key, _)| Error::format(path, format!("{} appears twice", Quoted(&key))))
}

/// A list of values of one kind.
fn list(values: &[Json]) -> Option<Value> {
    if let Some(integers) = values.iter().map(Json::as_i64).collect::<Option<Vec<_>>>() {
        let bytes = integers.iter().flat_map(|v| v.to_le_bytes()).collect();
        return Some(Value::Numbers(NumberArray::new(NumberKind::I64, bytes)));
    }
    if let Some(floats) = values.iter().map(Json::as_f64).collect::<Option<Vec<_>>>() {
        let bytes = floats.iter().flat_map(|v| v.to_le_bytes()).collect();
        return Some(Value::Numbers(NumberArray::new(NumberKind::F64, bytes)));
    }
    if let Some(truths) = values.iter().map(Json::as_bool).collect::<Option<Vec<_>>>() {
        let bytes = truths.into_iter().map(u8::from).collect();
        return Some(Value::Numbers(NumberArray::new(NumberKind::Bool, bytes)));
    }
    let mut texts = StringArray::default();
    for value in values {
        texts.push(value.as_str()?);
    }
    Some(Value::Strings(texts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(text: &str) -> Result<Metadata> {
        let mut metadata = Metadata::default();
        let path = Path::new("config.json");
        add_object(&mut metadata, path, "", parse_object(path, text.as_bytes())?)?;
        Ok(metadata)
    }

    #[test]
    fn nested_values_have_dotted_keys() {
        let m = metadata(
            r#"{"a": {"b": 1, "c": null}, "d": [1, 2], "e": ["x"], "f": [1.5], "g": [{"h": true}]}"#,
        );
        let m = m.unwrap();
        assert_eq!(m.get("a.b"), Some(&Value::Unsigned(1)));
        assert_eq!(m.get("a.c"), None);
        assert_eq!(m.get("d").unwrap().as_numbers().unwrap().len(), 2);
        assert_eq!(m.get("e").unwrap().as_strings().unwrap().get(0), Some("x"));
        assert_eq!(m.get("f").unwrap().as_numbers().unwrap().kind(), NumberKind::F64);
        assert_eq!(m.get("g.0.h"), Some(&Value::Bool(true)));
    }

    #[test]
    fn ambiguous_settings_and_settings_that_are_no_object_are_refused() {
        for text in ["", "[]", "{", r#"{"a.b": 1, "a": {"b": 2}}"#, &"[".repeat(100_000)] {
            assert!(metadata(text).is_err(), "{text}");
        }
    }
}
