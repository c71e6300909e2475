//! Rules for parsing the fields of a request: unsupported fields that would change the answer are refused by name, null means
//! absent, and `2.0` is an integer.

use std::fmt;

use forebay_engine::Error as EngineError;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The body of a request, with a list of its unsupported fields.
pub trait Fields: for<'de> Deserialize<'de> {
    /// Unsupported fields that would change the answer. Fields that are neither here nor in the body are ignored.
    const UNSUPPORTED: &'static [&'static [Unsupported]];

    /// Fields of chats that this API does not document but this server understands.
    const FROM_CHAT: &'static [&'static str] = &[];

    /// Takes the fields found of [`FROM_CHAT`](Self::FROM_CHAT).
    fn keep(&mut self, _from_chat: Map<String, Value>) {}
}

/// An unsupported field that would change the answer.
#[derive(Debug)]
pub struct Unsupported {
    pub name: &'static str,
    /// Values that disable the field; null is always one of them.
    pub harmless: &'static [Said<'static>],
    /// Why it is not supported, or what to use instead.
    pub reason: &'static str,
}

/// A value, reduced to what decides whether it disables its field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Said<'a> {
    Bool(bool),
    Number(f64),
    Text(&'a str),
    /// An empty text, list or object.
    Empty,
    Other,
}

/// A parsed body, before the check for unsupported fields.
pub struct Unchecked<T> {
    body: T,
    refused: Option<&'static Unsupported>,
}

impl<T> Unchecked<T> {
    /// The body.
    ///
    /// # Errors
    /// If it has an unsupported field.
    pub fn supported(self) -> Result<T, EngineError> {
        match self.refused {
            None => Ok(self.body),
            Some(Unsupported { name, reason, .. }) => {
                Err(EngineError::field(*name, format!("{name} is not supported: {reason}")))
            }
        }
    }
}

impl<'de, T: Fields> Deserialize<'de> for Unchecked<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Unchecked<T>, D::Error> {
        deserializer.deserialize_map(BodyVisitor(std::marker::PhantomData))
    }
}

struct BodyVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: Fields> Visitor<'de> for BodyVisitor<T> {
    type Value = Unchecked<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Unchecked<T>, A::Error> {
        let (mut refused, mut from_chat) = (None, Map::new());
        let known = KnownFields {
            map,
            unsupported: T::UNSUPPORTED,
            from_chat: T::FROM_CHAT,
            refused: &mut refused,
            kept: &mut from_chat,
        };
        let mut body = T::deserialize(MapAccessDeserializer::new(known))?;
        body.keep(from_chat);
        Ok(Unchecked { body, refused })
    }
}

/// The fields of a body without those that are checked here. It copies nothing.
struct KnownFields<'a, A> {
    map: A,
    unsupported: &'static [&'static [Unsupported]],
    from_chat: &'static [&'static str],
    refused: &'a mut Option<&'static Unsupported>,
    kept: &'a mut Map<String, Value>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for KnownFields<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        while let Some(name) = self.map.next_key::<std::borrow::Cow<'de, str>>()? {
            if let Some(field) = self.unsupported.iter().copied().flatten().find(|field| field.name == name) {
                if self.map.next_value_seed(Asks(field))? {
                    self.refused.get_or_insert(field);
                }
            } else if self.from_chat.contains(&&*name) {
                let value: Value = self.map.next_value()?;
                if !value.is_null() {
                    self.kept.insert(name.into_owned(), value);
                }
            } else {
                let name = serde::de::value::CowStrDeserializer::new(name);
                return seed.deserialize(name).map(Some);
            }
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}

/// Parses whether the value of a field disables it.
struct Asks(&'static Unsupported);

impl Asks {
    fn judge<E>(self, said: Said<'_>) -> Result<bool, E> {
        let text_is_empty = said == Said::Text("") && self.0.harmless.contains(&Said::Empty);
        Ok(!text_is_empty && !self.0.harmless.contains(&said))
    }
}

impl<'de> DeserializeSeed<'de> for Asks {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Asks {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_bool<E>(self, value: bool) -> Result<bool, E> {
        self.judge(Said::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<bool, E> {
        self.judge(Said::Number(value as f64))
    }

    fn visit_u64<E>(self, value: u64) -> Result<bool, E> {
        self.judge(Said::Number(value as f64))
    }

    fn visit_f64<E>(self, value: f64) -> Result<bool, E> {
        self.judge(Said::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<bool, E> {
        self.judge(Said::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<bool, A::Error> {
        let mut said = Said::Empty;
        while list.next_element::<IgnoredAny>()?.is_some() {
            said = Said::Other;
        }
        self.judge(said)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut said = Said::Empty;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            said = Said::Other;
        }
        self.judge(said)
    }
}

/// Parses a field in which null means absent.
pub fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Parses an integer, which may have a decimal point: `2.0` is 2.
pub fn integer<'de, D: Deserializer<'de>, T: TryFrom<i128>>(deserializer: D) -> Result<Option<T>, D::Error> {
    Ok(Option::<Integer<T>>::deserialize(deserializer)?.map(|integer| integer.0))
}

/// Parses a list of integers, as [`integer`] does.
pub fn integers<'de, D: Deserializer<'de>, T: TryFrom<i128>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let integers = Option::<Vec<Integer<T>>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(integers.into_iter().map(|integer| integer.0).collect())
}

/// An integer that may have a decimal point.
#[derive(Clone, Copy, Debug)]
pub struct Integer<T>(pub T);

impl<'de, T: TryFrom<i128>> Deserialize<'de> for Integer<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Integer<T>, D::Error> {
        deserializer.deserialize_any(IntegerVisitor(std::marker::PhantomData))
    }
}

struct IntegerVisitor<T>(std::marker::PhantomData<T>);

impl<T: TryFrom<i128>> Visitor<'_> for IntegerVisitor<T> {
    type Value = Integer<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Integer<T>, E> {
        convert(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Integer<T>, E> {
        convert(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Integer<T>, E> {
        if value.fract() != 0.0 || !value.is_finite() {
            return Err(E::invalid_type(serde::de::Unexpected::Float(value), &self));
        }
        convert(value as i128)
    }
}

fn convert<T: TryFrom<i128>, E: Error>(value: i128) -> Result<Integer<T>, E> {
    T::try_from(value).map(Integer).map_err(|_| E::custom(format!("{value} is out of range")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default)]
    struct Body {
        #[serde(deserialize_with = "integer")]
        n: Option<u8>,
        #[serde(deserialize_with = "or_default")]
        names: Vec<String>,
        #[serde(skip)]
        kept: Map<String, Value>,
    }

    impl Fields for Body {
        const UNSUPPORTED: &'static [&'static [Unsupported]] = &[
            &[Unsupported {
                name: "wild",
                harmless: &[Said::Bool(false), Said::Number(0.0)],
                reason: "tame",
            }],
            &[Unsupported { name: "list", harmless: &[Said::Empty, Said::Text("no")], reason: "none" }],
        ];
        const FROM_CHAT: &'static [&'static str] = &["seed"];

        fn keep(&mut self, from_chat: Map<String, Value>) {
            self.kept = from_chat;
        }
    }

    fn read(value: Value) -> Result<Body, EngineError> {
        // As it comes, and once it has been read: both are ways that bodies take.
        let direct = serde_json::from_str::<Unchecked<Body>>(&value.to_string());
        let body = super::super::read_fields::<Unchecked<Body>>(value)?.supported();
        assert_eq!(
            direct.unwrap().supported().ok(),
            body.as_ref().ok().map(|body| Body {
                n: body.n,
                names: body.names.clone(),
                kept: body.kept.clone(),
            })
        );
        body
    }

    /// The field that is the reason, and why.
    fn refused<T>(result: Result<T, EngineError>) -> (String, String) {
        match result.err().unwrap() {
            EngineError::Field { field, error } => (field, error.to_string()),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_unless_it_asks_for_nothing() {
        for fine in [json!(null), json!(false), json!(0), json!(0.0)] {
            assert!(read(json!({ "n": 1, "wild": fine, "names": ["a"] })).is_ok(), "{fine}");
        }
        for fine in [json!(""), json!([]), json!({}), json!("no")] {
            assert!(read(json!({ "list": fine })).is_ok(), "{fine}");
        }
        for wrong in [json!(true), json!(1), json!(-1), json!("x"), json!(""), json!([1]), json!({ "a": 1 })]
        {
            let refused = refused(read(json!({ "n": 1, "wild": wrong, "list": [] })));
            assert_eq!(refused, ("wild".into(), "wild is not supported: tame".into()), "{wrong}");
        }
        assert_eq!(refused(read(json!({ "list": ["x"] }))).0, "list");
    }

    #[test]
    fn fields_of_a_chat_are_kept_and_unknown_ones_ignored() {
        let body = read(json!({ "seed": [1], "n": 2, "unheard_of": { "n": 3 } })).unwrap();
        assert_eq!(Value::Object(body.kept), json!({ "seed": [1] }));
        assert_eq!(body.n, Some(2));
    }

    #[test]
    fn null_is_absent_and_a_decimal_point_makes_no_difference() {
        let n = |value: Value| read(json!({ "n": value })).map(|body| body.n);
        assert_eq!(n(json!(2.0)).unwrap(), Some(2));
        assert_eq!(n(json!(2)).unwrap(), Some(2));
        assert_eq!(n(json!(null)).unwrap(), None);
        assert_eq!(read(json!({ "names": null })).unwrap().names, Vec::<String>::new());
        for wrong in [json!(2.5), json!(256), json!(-1), json!("2"), json!(1e300)] {
            let read = super::super::read_fields::<Unchecked<Body>>(json!({ "n": wrong }));
            assert_eq!(refused(read).0, "n", "{wrong}");
        }
    }
}
