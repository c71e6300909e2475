//! The settings of a file that no family's code has read. Converters write many of them. A setting that changes the
//! arithmetic must not be ignored.
//!
//! In GGUF files, every setting of the model must be read, or be listed as one that changes nothing, or have a value that
//! turns it off. Otherwise the model is refused. The settings of folders cannot all be known, because other programs add
//! theirs. There, those that are known to change the arithmetic are refused.

mod folder;
mod gguf;

pub use gguf::is_ignored;

use super::Config;
use crate::error::{Error, Result};
use crate::format::{Format, NumberArray, Quoted, Value};

/// The values of a setting with which it changes nothing.
#[derive(Clone, Copy)]
enum Neutral {
    /// Any: it does not take part in the arithmetic of text.
    Any,
    /// Zero, `false`, an empty list or a list of these.
    Off,
    /// An empty list: numbers of layers, of which the first is zero.
    Empty,
    /// As [`Neutral::Off`], or one: factors, counts of groups.
    One,
    /// Exactly one: a factor that is always applied.
    Factor,
    /// `true`, another number than zero, or a list of these.
    On,
    /// This value, because the family computes it so, whatever the file says.
    Is(bool),
    /// The number that another setting has.
    Like(&'static str),
    /// One of these words, or a list of these.
    Words(&'static [&'static str]),
    /// A window that is off or covers the whole context.
    Window,
    /// Any, if no layer has a window.
    OfWindow,
}

/// Refuses a model with a setting that its family's code has not read and that may change the arithmetic. `arch` is the
/// family's name in GGUF files.
///
/// # Errors
/// [`Error::Unsupported`], with the name of the setting and its value; [`Error::Format`] if a setting without which the
/// arithmetic is unknown is missing.
pub fn refuse(arch: &str, config: &Config<'_>) -> Result<()> {
    if config.format() != Format::Gguf {
        folder::require(arch, config)?;
    }
    for (name, key, value) in config.unread() {
        let (neutral, problem) = match config.format() {
            Format::Gguf => (
                gguf::neutral(arch, key),
                "is unknown and may change the arithmetic; a newer version may support it",
            ),
            Format::HuggingFace | Format::Mlx => match folder::neutral(key) {
                None => continue,
                known => (known, ""),
            },
        };
        let problem = match neutral {
            Some(neutral) if neutral.allows(config, value) => continue,
            Some(_) => "is not supported by this architecture",
            None => problem,
        };
        let (path, shown) = (config.path(), shown(value));
        return Err(Error::Unsupported(format!("{}: {name} = {} {problem}", path.display(), Quoted(&shown))));
    }
    Ok(())
}

impl Neutral {
    /// Whether a setting with this value changes nothing.
    fn allows(self, config: &Config<'_>, value: &Value) -> bool {
        let number = number(value);
        let all = |allowed: fn(f64) -> bool| numbers(value).is_some_and(|list| list.into_iter().all(allowed));
        let other = |key: &str| config.unchecked(key).and_then(self::number);
        match self {
            Neutral::Any => true,
            Neutral::Off => all(|n| n == 0.0),
            Neutral::Empty => value.as_numbers().is_some_and(NumberArray::is_empty),
            Neutral::One => number.is_some_and(|n| n == 0.0 || n == 1.0),
            Neutral::Factor => number == Some(1.0),
            Neutral::On => all(|n| n != 0.0),
            Neutral::Is(computed) => value.as_bool() == Some(computed),
            Neutral::Like(key @ "rope.freq_base") => number == Some(other(key).unwrap_or(10_000.0)),
            Neutral::Like(key) => number.is_some() && number == other(key),
            Neutral::Words(words) => match value {
                Value::String(word) => words.contains(&&**word),
                Value::Strings(list) => list.iter().all(|word| words.contains(&word)),
                _ => false,
            },
            Neutral::Window => {
                number.is_some_and(|n| n == 0.0 || other("context_length").is_some_and(|all| n >= all))
            }
            Neutral::OfWindow => !config.has_read("attention.sliding_window"),
        }
    }
}

/// A number; booleans count as zero and one.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_bool().map(f64::from))
}

/// A number or the numbers of a list.
fn numbers(value: &Value) -> Option<Vec<f64>> {
    match value.as_numbers() {
        Some(list) => list.iter().map(|element| number(&element)).collect(),
        None => number(value).map(|number| vec![number]),
    }
}

/// A value for messages.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Unsigned(v) => v.to_string(),
        Value::Signed(v) => v.to_string(),
        Value::Float(v) => (*v as f32).to_string(),
        Value::Bool(v) => v.to_string(),
        Value::String(v) => v.clone(),
        Value::Strings(list) => format!("{:?}", list.iter().take(SHOWN).collect::<Vec<_>>()),
        Value::Numbers(list) => {
            let shown: Vec<_> = list.iter().take(SHOWN).map(|element| self::shown(&element)).collect();
            format!("[{}]", shown.join(", "))
        }
    }
}

/// How many elements of a list are shown, of which messages take the start of the text.
const SHOWN: usize = 80;
