//! The metadata section of a header: keys with typed values.

use super::reader::Reader;
use crate::error::Result;
use crate::format::{Metadata, NumberArray, NumberKind, Quoted, StringArray, Value};

/// The smallest entry: the length of a key and one byte of it, a type and one byte of value.
pub(super) const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;

/// The longest key that the format allows.
const MAX_KEY_BYTES: u64 = 65_535;

/// The smallest string: its length.
const MIN_STRING_BYTES: u64 = 8;

/// Reads `count` entries.
pub(super) fn read_metadata(reader: &mut Reader, count: u64) -> Result<Metadata> {
    let mut metadata = Metadata::default();
    for index in 0..count {
        let start = reader.offset();
        let key = reader.string(MAX_KEY_BYTES, format_args!("the key of metadata entry {index}"))?;
        if key.is_empty() {
            return Err(
                reader.damaged(format!("the key of metadata entry {index} at offset {start} is empty"))
            );
        }
        let value = read_value(reader, &key)?;
        if let Err((key, _)) = metadata.insert(key, value) {
            let key = Quoted(&key);
            return Err(
                reader.damaged(format!("the metadata key {key} at offset {start} appears a second time"))
            );
        }
    }
    Ok(metadata)
}

/// The types that identifiers of values and of array elements stand for.
enum ValueType {
    Number(NumberKind),
    String,
    Array,
}

impl ValueType {
    fn read(reader: &mut Reader, key: &str) -> Result<ValueType> {
        let start = reader.offset();
        let id = reader.u32(format_args!("the type of {}", Quoted(key)))?;
        Ok(match id {
            0 => ValueType::Number(NumberKind::U8),
            1 => ValueType::Number(NumberKind::I8),
            2 => ValueType::Number(NumberKind::U16),
            3 => ValueType::Number(NumberKind::I16),
            4 => ValueType::Number(NumberKind::U32),
            5 => ValueType::Number(NumberKind::I32),
            6 => ValueType::Number(NumberKind::F32),
            7 => ValueType::Number(NumberKind::Bool),
            8 => ValueType::String,
            9 => ValueType::Array,
            10 => ValueType::Number(NumberKind::U64),
            11 => ValueType::Number(NumberKind::I64),
            12 => ValueType::Number(NumberKind::F64),
            _ => {
                let key = Quoted(key);
                return Err(
                    reader.damaged(format!("{key} has the unknown value type {id} at offset {start}"))
                );
            }
        })
    }
}

fn read_value(reader: &mut Reader, key: &str) -> Result<Value> {
    match ValueType::read(reader, key)? {
        ValueType::Number(kind) => {
            let mut largest = [0; 8];
            let bytes = &mut largest[..kind.size()];
            reader.fill(bytes, format_args!("the value of {}", Quoted(key)))?;
            check_bools(reader, key, kind, bytes)?;
            Ok(kind.decode(bytes))
        }
        ValueType::String => {
            Ok(Value::String(reader.string(u64::MAX, format_args!("the value of {}", Quoted(key)))?))
        }
        ValueType::Array => read_array(reader, key),
    }
}

fn read_array(reader: &mut Reader, key: &str) -> Result<Value> {
    let elements = ValueType::read(reader, key)?;
    let count = reader.u64(format_args!("the number of elements of {}", Quoted(key)))?;
    let min_bytes = match elements {
        ValueType::Number(kind) => kind.size() as u64,
        ValueType::String => MIN_STRING_BYTES,
        ValueType::Array => {
            return Err(reader.unsupported(format!("{} is an array of arrays", Quoted(key))));
        }
    };
    let left = reader.remaining();
    let bytes = match count.checked_mul(min_bytes) {
        Some(bytes) if bytes <= left => bytes,
        _ => {
            let key = Quoted(key);
            return Err(reader.damaged(format!(
                "the array {key} claims {count} elements, which the last {left} bytes of the file cannot hold"
            )));
        }
    };

    if let ValueType::Number(kind) = elements {
        let bytes = reader.bytes(bytes, format_args!("the elements of {}", Quoted(key)))?;
        check_bools(reader, key, kind, &bytes)?;
        return Ok(Value::Numbers(NumberArray::new(kind, bytes)));
    }
    let mut strings = StringArray::default();
    let mut buffer = Vec::new();
    for index in 0..count {
        strings.push(reader.str_in(&mut buffer, format_args!("element {index} of {}", Quoted(key)))?);
    }
    strings.shrink_to_fit();
    Ok(Value::Strings(strings))
}

/// Refuses booleans other than 0 and 1.
fn check_bools(reader: &Reader, key: &str, kind: NumberKind, bytes: &[u8]) -> Result<()> {
    match bytes.iter().find(|&&b| b > 1) {
        Some(byte) if kind == NumberKind::Bool => {
            Err(reader
                .damaged(format!("{} has the byte {byte} as a boolean, which must be 0 or 1", Quoted(key))))
        }
        _ => Ok(()),
    }
}
