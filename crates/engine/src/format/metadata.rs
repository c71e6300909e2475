//! The metadata of a model file: typed values by key, stored as compactly as in the file.

use std::collections::HashMap;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    String(String),
    /// A list of strings.
    Strings(StringArray),
    /// A list of numbers or booleans.
    Numbers(NumberArray),
}

impl Value {
    /// The value as an unsigned integer, if it is a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(v) => Some(v),
            Value::Signed(v) => u64::try_from(v).ok(),
            _ => None,
        }
    }

    /// The value as a float, if it is a number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::Unsigned(v) => Some(v as f64),
            Value::Signed(v) => Some(v as f64),
            Value::Float(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a list of strings.
    pub fn as_strings(&self) -> Option<&StringArray> {
        match self {
            Value::Strings(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a list of numbers.
    pub fn as_numbers(&self) -> Option<&NumberArray> {
        match self {
            Value::Numbers(v) => Some(v),
            _ => None,
        }
    }
}

/// Many strings in one allocation. Separate strings would take several times the vocabulary's size on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringArray {
    text: String,
    /// The end of each string in `text`; it starts where the previous one ends.
    ends: Vec<usize>,
}

impl StringArray {
    /// Appends a string.
    pub fn push(&mut self, s: &str) {
        self.text.push_str(s);
        self.ends.push(self.text.len());
    }

    /// Frees memory that was allocated in advance.
    pub fn shrink_to_fit(&mut self) {
        self.text.shrink_to_fit();
        self.ends.shrink_to_fit();
    }

    /// The number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }

    /// The strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }
}

/// The type of the elements of a [`NumberArray`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum NumberKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F64,
    Bool,
}

impl NumberKind {
    /// Bytes of one element in the file.
    pub fn size(self) -> usize {
        match self {
            NumberKind::U8 | NumberKind::I8 | NumberKind::Bool => 1,
            NumberKind::U16 | NumberKind::I16 => 2,
            NumberKind::U32 | NumberKind::I32 | NumberKind::F32 => 4,
            NumberKind::U64 | NumberKind::I64 | NumberKind::F64 => 8,
        }
    }

    /// The value whose little-endian bytes are `bytes`, which must be [`size`](Self::size) long.
    pub fn decode(self, bytes: &[u8]) -> Value {
        fn le<const N: usize>(bytes: &[u8]) -> [u8; N] {
            bytes.try_into().expect("the caller passes exactly one element")
        }
        match self {
            NumberKind::U8 => Value::Unsigned(bytes[0].into()),
            NumberKind::I8 => Value::Signed((bytes[0] as i8).into()),
            NumberKind::U16 => Value::Unsigned(u16::from_le_bytes(le(bytes)).into()),
            NumberKind::I16 => Value::Signed(i16::from_le_bytes(le(bytes)).into()),
            NumberKind::U32 => Value::Unsigned(u32::from_le_bytes(le(bytes)).into()),
            NumberKind::I32 => Value::Signed(i32::from_le_bytes(le(bytes)).into()),
            NumberKind::U64 => Value::Unsigned(u64::from_le_bytes(le(bytes))),
            NumberKind::I64 => Value::Signed(i64::from_le_bytes(le(bytes))),
            NumberKind::F32 => Value::Float(f32::from_le_bytes(le(bytes)).into()),
            NumberKind::F64 => Value::Float(f64::from_le_bytes(le(bytes))),
            NumberKind::Bool => Value::Bool(bytes[0] != 0),
        }
    }
}

/// Many numbers, stored as the file's own bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberArray {
    kind: NumberKind,
    bytes: Vec<u8>,
}

impl NumberArray {
    /// Wraps little-endian bytes, whose length must be a multiple of the element's size.
    pub fn new(kind: NumberKind, bytes: Vec<u8>) -> NumberArray {
        assert!(bytes.len().is_multiple_of(kind.size()));
        NumberArray { kind, bytes }
    }

    /// The type of the elements.
    pub fn kind(&self) -> NumberKind {
        self.kind
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.kind.size()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Value> {
        self.bytes.chunks_exact(self.kind.size()).map(|b| self.kind.decode(b))
    }
}

/// Keys and values, in the file's order.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl Metadata {
    /// Adds an entry; returns it if the key exists already.
    pub fn insert(&mut self, key: String, value: Value) -> Result<(), (String, Value)> {
        if self.by_key.contains_key(&key) {
            return Err((key, value));
        }
        self.by_key.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        Ok(())
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.entries[i].1)
    }

    /// The value of a key, if it is a string.
    pub fn str(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    /// All entries in the file's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_read_back() {
        let mut a = StringArray::default();
        for s in ["", "a", "ünï", ""] {
            a.push(s);
        }
        assert_eq!(a.iter().collect::<Vec<_>>(), ["", "a", "ünï", ""]);
        assert_eq!(a.get(4), None);
    }

    #[test]
    fn numbers_keep_their_sign_and_type() {
        let a = NumberArray::new(NumberKind::I16, vec![0xff, 0xff, 2, 0]);
        assert_eq!(a.iter().collect::<Vec<_>>(), [Value::Signed(-1), Value::Signed(2)]);
    }

    #[test]
    fn a_key_is_taken_once() {
        let mut m = Metadata::default();
        assert!(m.insert("a".into(), Value::Bool(true)).is_ok());
        assert!(m.insert("a".into(), Value::Bool(false)).is_err());
        assert_eq!(m.get("a"), Some(&Value::Bool(true)));
    }
}
