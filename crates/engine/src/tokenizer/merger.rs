//! Merging by the crate `tokenizers`, with the feature of the same name. Without it, vocabularies that need merging
//! are refused.

pub(super) use implementation::{Merger, Vocab, normal_form};

#[cfg(feature = "tokenizers")]
mod implementation {
    use tokenizers::models::bpe::BPE;
    use tokenizers::normalizers::{NFC, NFD, NFKC, NFKD};
    use tokenizers::{Model as _, NormalizedString, Normalizer as _};

    use crate::TokenId;
    use crate::tokenizer::bpe::MergeRules;
    use crate::tokenizer::normalise::Form;

    pub use tokenizers::models::bpe::Vocab;

    /// A vocabulary and its merges.
    #[derive(Debug)]
    pub struct Merger(BPE);

    impl Merger {
        /// Builds the merger.
        ///
        /// # Errors
        /// The library's message.
        pub fn new(words: Vocab, merges: Vec<(String, String)>, rules: MergeRules) -> Result<Merger, String> {
            let mut builder = BPE::builder()
                .vocab_and_merges(words, merges)
                .fuse_unk(rules.fuses_unknown)
                .byte_fallback(rules.byte_fallback)
                .ignore_merges(rules.ignores_merges)
                // The cache is per thread, outlives the tokenizer, and is not part of the memory plan.
                .cache_capacity(0);
            if let Some(unknown) = rules.unknown {
                builder = builder.unk_token(unknown);
            }
            builder.build().map(Merger).map_err(|e| e.to_string())
        }

        /// Whether unspellable neighbours become one token.
        pub fn fuses_unknown(&self) -> bool {
            self.0.fuse_unk && self.0.unk_token.is_some()
        }

        /// The token with this spelling.
        pub fn find(&self, word: &str) -> Option<u32> {
            self.0.token_to_id(word)
        }

        /// Appends the tokens of a word; returns where the last one ends in it.
        ///
        /// # Errors
        /// The library's message.
        pub fn merge(&self, word: &str, tokens: &mut Vec<TokenId>) -> Result<usize, String> {
            let merged = self.0.tokenize(word).map_err(|e| e.to_string())?;
            tokens.extend(merged.iter().map(|token| TokenId(token.id)));
            Ok(merged.last().map_or(0, |token| token.offsets.1))
        }
    }

    /// A text in a Unicode normal form, by the library's tables, so that the form is the same as in the model's
    /// training.
    pub fn normal_form(form: Form, text: String) -> String {
        let mut text = NormalizedString::from(text);
        let result = match form {
            Form::Nfc => NFC.normalize(&mut text),
            Form::Nfd => NFD.normalize(&mut text),
            Form::Nfkc => NFKC.normalize(&mut text),
            Form::Nfkd => NFKD.normalize(&mut text),
        };
        result.expect("normal forms know no error");
        text.get().to_owned()
    }
}

#[cfg(not(feature = "tokenizers"))]
mod implementation {
    use std::collections::HashMap;

    use crate::TokenId;
    use crate::tokenizer::bpe::MergeRules;
    use crate::tokenizer::normalise::Form;

    pub type Vocab = HashMap<String, u32>;

    /// Does not exist without the feature.
    #[derive(Debug)]
    pub enum Merger {}

    impl Merger {
        /// # Errors
        /// Always.
        pub fn new(_: Vocab, _: Vec<(String, String)>, _: MergeRules) -> Result<Merger, String> {
            Err("the vocabulary needs byte pair encoding, which this build of forebay-engine lacks: enable its feature \
                 `tokenizers`"
                .into())
        }

        pub fn fuses_unknown(&self) -> bool {
            match *self {}
        }

        pub fn find(&self, _: &str) -> Option<u32> {
            match *self {}
        }

        pub fn merge(&self, _: &str, _: &mut Vec<TokenId>) -> Result<usize, String> {
            match *self {}
        }
    }

    pub fn normal_form(_: Form, _: String) -> String {
        unreachable!("only byte pair encoders ask for normal forms, and there is none")
    }
}
