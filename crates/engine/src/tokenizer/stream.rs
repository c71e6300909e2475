//! Converts tokens to text as they arrive.

use super::Tokenizer;
use crate::TokenId;

/// Decodes token by token and never returns part of a character: if a token ends inside one, its bytes wait for the
/// next token. The joined results equal [`Tokenizer::decode`] of all tokens.
///
/// # Examples
/// ```
/// use forebay_engine::tokenizer::StreamDecoder;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let tokenizer = engine.tokenizer();
/// let mut decoder = StreamDecoder::new(false);
/// let mut text = String::new();
/// for token in tokenizer.encode("A café.", Default::default())? {
///     text += &decoder.push(tokenizer, token);
/// }
/// text += &decoder.finish();
/// assert_eq!(text, "A café.");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    special: bool,
    /// Control tokens to print, whatever `special` is.
    shown: Vec<TokenId>,
    /// Whether there was text before.
    started: bool,
    /// The start of an incomplete character: at most three bytes between calls.
    held: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder for the start of a text; `special` says whether control tokens are printed. If the tokenizer puts a
    /// space in front of every text, the decoder removes it.
    pub fn new(special: bool) -> StreamDecoder {
        StreamDecoder { special, ..StreamDecoder::default() }
    }

    /// A decoder for tokens that continue a text, such as generated ones: a space at their start is part of the text.
    pub fn continuing(special: bool) -> StreamDecoder {
        StreamDecoder { started: true, ..StreamDecoder::new(special) }
    }

    /// The same decoder, which also prints these control tokens.
    pub fn showing(self, shown: Vec<TokenId>) -> StreamDecoder {
        StreamDecoder { shown, ..self }
    }

    /// Decodes the next token; returns the text that is complete with it.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: TokenId) -> String {
        if self.special || !tokenizer.is_control(id) || self.shown.contains(&id) {
            let bytes = tokenizer.token_bytes(id);
            let strips_space = tokenizer.strips_space && !self.started;
            self.held.extend_from_slice(match bytes.strip_prefix(b" ") {
                Some(rest) if strips_space => rest,
                _ => bytes,
            });
            self.started |= !bytes.is_empty();
        }
        self.take_complete()
    }

    /// Ends the text; returns a replacement character if it ends inside a character.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        rest
    }

    /// Decodes the held bytes up to the start of an incomplete character. Whether bytes are invalid or incomplete
    /// depends only on themselves, so decoding in pieces equals decoding at once.
    fn take_complete(&mut self) -> String {
        let unfinished = match self.held.utf8_chunks().last() {
            Some(last) if may_continue(last.invalid()) => last.invalid().len(),
            _ => 0,
        };
        let complete = self.held.len() - unfinished;
        let text = String::from_utf8_lossy(&self.held[..complete]).into_owned();
        self.held.drain(..complete);
        text
    }
}

/// Whether more bytes can complete these, which end a text, to a valid character.
fn may_continue(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(e) if e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decodes raw bytes in pieces, as tokens contain them.
    fn stream(pieces: &[Vec<u8>]) -> String {
        let mut decoder = StreamDecoder::default();
        let mut text = String::new();
        for piece in pieces {
            decoder.held.extend_from_slice(piece);
            text += &decoder.take_complete();
            assert!(decoder.held.len() < 4, "more than one character is held back");
        }
        text + &decoder.finish()
    }

    #[test]
    fn half_a_character_waits_for_the_rest() {
        let mut decoder = StreamDecoder::default();
        decoder.held.extend_from_slice("é".as_bytes().split_last().unwrap().1);
        assert_eq!(decoder.take_complete(), "");
        decoder.held.push("é".as_bytes()[1]);
        assert_eq!(decoder.take_complete(), "é");
        assert_eq!(decoder.finish(), "");
    }

    proptest! {
        #[test]
        fn any_cut_of_any_bytes_gives_the_lossy_text(
            pieces in prop::collection::vec(prop::collection::vec(byte(), 0..6), 0..12),
        ) {
            let whole: Vec<u8> = pieces.concat();
            prop_assert_eq!(stream(&pieces), String::from_utf8_lossy(&whole));
        }

        #[test]
        fn valid_text_cut_anywhere_comes_back(text in any::<String>(), size in 1usize..5) {
            let pieces: Vec<Vec<u8>> = text.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            prop_assert_eq!(stream(&pieces), text);
        }
    }

    /// Bytes that start, continue or break characters more often than random ones.
    fn byte() -> impl Strategy<Value = u8> {
        prop_oneof![
            any::<u8>(),
            0x80u8..0xc0,
            prop::sample::select(vec![0xc2, 0xe0, 0xe2, 0xed, 0xef, 0xf0, 0xf4]),
            0x61u8..0x64
        ]
    }
}
