//! A limit on the length of reasoning.

use super::Parser;
use crate::TokenId;

/// Follows an answer and, once its reasoning reaches the limit, returns the tokens that end it. The model then writes
/// the answer as usual.
///
/// # Examples
/// ```
/// use forebay_engine::Request;
/// use forebay_engine::chat::dialect::Dialect;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let tokens = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let dialect = Dialect::of("<think></think>");
/// let limit = dialect.limit(100, "Once upon a time", &[], engine.tokenizer())?;
/// let request = Request::new(&engine, tokens)?.reasoning(Some(limit));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ReasoningLimit {
    parser: Parser,
    /// Tokens of reasoning left.
    left: usize,
    /// The tokens that end reasoning.
    end: Vec<TokenId>,
    /// How many of these have been generated.
    ended: usize,
}

impl ReasoningLimit {
    /// Follows the text with `parser`.
    pub(super) fn new(parser: Parser, most: usize, end: Vec<TokenId>) -> ReasoningLimit {
        ReasoningLimit { parser, left: most, end, ended: 0 }
    }

    /// The token that must come next, if the limit is reached.
    pub(crate) fn next(&self) -> Option<TokenId> {
        let ends = self.ended > 0 || (self.left == 0 && self.parser.is_reasoning());
        self.end.get(self.ended).copied().filter(|_| ends)
    }

    /// Receives the generated token and its text.
    pub(crate) fn take(&mut self, token: TokenId, text: &str) {
        let as_said = self.next() == Some(token);
        self.ended = if as_said { (self.ended + 1) % self.end.len() } else { 0 };
        self.parser.push(text, &mut |_| {});
        if self.parser.is_reasoning() {
            self.left = self.left.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::dialect::Dialect;

    #[test]
    fn a_call_inside_reasoning_is_not_interrupted() {
        let template = "<think><tool_call>{\"name\": …, \"arguments\": …}</tool_call>";
        let parser = Dialect::of(template).parser("<think>", &[serde_json::json!({ "name": "now" })]);
        let [other, end] = [0, 1].map(TokenId);
        let mut limit = ReasoningLimit::new(parser, 1, vec![end]);
        limit.take(other, "Hm. <tool_call>");
        assert_eq!(limit.next(), None);
        // The text turns out to be no call: reasoning continues and is ended.
        limit.take(other, "is a tag.");
        assert_eq!(limit.next(), Some(end));
        for text in ["<tool_call>", "{\"name\": \"now\", ", "\"arguments\": {}}", "</tool_call>", "Done."] {
            limit.take(other, text);
            assert_eq!(limit.next(), None, "{text}");
        }
    }

    #[test]
    fn reasoning_that_begins_again_is_ended_again() {
        let parser = Dialect::of("<|channel|><|message|>").parser("<|start|>assistant", &[]);
        let [other, first, second] = [0, 1, 2].map(TokenId);
        let mut limit = ReasoningLimit::new(parser, 1, vec![first, second]);
        for _ in 0..2 {
            assert_eq!(limit.next(), None);
            limit.take(other, "<|channel|>analysis<|message|>Hm.");
            assert_eq!(limit.next(), Some(first));
            limit.take(first, "<|end|>");
            assert_eq!(limit.next(), Some(second));
            limit.take(second, "<|start|>assistant");
        }
        // If another token was generated instead, ending starts again.
        limit.take(other, "<|channel|>analysis<|message|>Hm.");
        limit.take(first, "<|end|>");
        limit.take(other, "<|channel|>analysis<|message|>");
        assert_eq!(limit.next(), Some(first));
    }
}
