//! The tokenizer of a synthetic model: every byte is a token, the others are made-up words.

use crate::format::{NumberArray, NumberKind, StringArray, Value};
use crate::tokenizer::byte_character;

/// The tokens of every vocabulary: the bytes and the control tokens.
pub const FEWEST_TOKENS: u64 = 256 + CONTROL.len() as u64;

/// The control tokens, at the end of the vocabulary.
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Numbers of token types in GGUF files.
const NORMAL: i32 = 1;
const IS_CONTROL: i32 = 3;

const TEMPLATE: &str = "\
{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The metadata of a tokenizer with `count` tokens.
pub(super) fn metadata(count: u64) -> Vec<(&'static str, Value)> {
    let words = (count - FEWEST_TOKENS) as usize;
    let mut texts = StringArray::default();
    (0..=u8::MAX).for_each(|byte| texts.push(byte_character(byte).encode_utf8(&mut [0; 4])));
    (0..words).for_each(|number| texts.push(&word(number)));
    CONTROL.iter().for_each(|text| texts.push(text));
    let kinds = std::iter::repeat_n(NORMAL, 256 + words).chain(CONTROL.map(|_| IS_CONTROL));
    let kinds = NumberArray::new(NumberKind::I32, kinds.flat_map(i32::to_le_bytes).collect());
    let control = |i: u64| Value::Unsigned(count - CONTROL.len() as u64 + i);
    vec![
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("gpt-2".into())),
        ("tokenizer.ggml.tokens", Value::Strings(texts)),
        ("tokenizer.ggml.token_type", Value::Numbers(kinds)),
        // Without merges, a text has as many tokens as bytes.
        ("tokenizer.ggml.merges", Value::Strings(StringArray::default())),
        ("tokenizer.ggml.bos_token_id", control(0)),
        ("tokenizer.ggml.eos_token_id", control(2)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
        ("tokenizer.chat_template", Value::String(TEMPLATE.into())),
    ]
}

/// A word with a space before it, different for each number: its syllables are the number's digits in a base without
/// zero.
fn word(mut number: usize) -> String {
    const CONSONANTS: &[u8] = b"bdfgklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    let syllables = CONSONANTS.len() * VOWELS.len();
    let mut word = String::from("Ġ");
    loop {
        let syllable = number % syllables;
        word.push(char::from(CONSONANTS[syllable / VOWELS.len()]));
        word.push(char::from(VOWELS[syllable % VOWELS.len()]));
        match (number / syllables).checked_sub(1) {
            Some(rest) => number = rest,
            None => return word,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn words_are_distinct() {
        let words: HashSet<_> = (0..100_000).map(word).collect();
        assert_eq!(words.len(), 100_000);
    }
}
