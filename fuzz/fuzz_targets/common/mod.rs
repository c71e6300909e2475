//! What every tokenizer must satisfy.

use forebay_engine::TokenId;
use forebay_engine::tokenizer::{Bos, EncodeOptions, Tokenizer};

/// Encodes and decodes texts of many kinds. The result must be tokens of the vocabulary, or an error.
pub fn check(tokenizer: &Tokenizer) {
    for text in [
        "",
        " ",
        "ab a<a> é\u{301}你好 12345\r\n\n  x <s></s>",
        "aaaaaaaaaaaaaaaaaaaa bbbb",
        "🦙\u{0}'s I'LL",
    ] {
        for special in [false, true] {
            for bos in [Bos::AsFileSays, Bos::Never, Bos::Always] {
                let Ok(tokens) = tokenizer.encode(text, EncodeOptions { special, bos }) else { continue };
                assert!(tokens.iter().all(|id| (id.0 as usize) < tokenizer.vocab_size()));
                tokenizer.decode(&tokens, special);
            }
        }
    }
    for id in (0..tokenizer.vocab_size().min(300) as u32 + 2).map(TokenId) {
        let text = tokenizer.token_text(id);
        assert!(tokenizer.find(&text).is_none_or(|found| tokenizer.token_text(found) == text));
    }
    assert!(tokenizer.end_tokens().iter().all(|id| (id.0 as usize) < tokenizer.vocab_size()));
}
