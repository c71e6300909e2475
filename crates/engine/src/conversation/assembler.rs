//! Splits the text of an answer, as it is generated, into reasoning, content and tool calls.

use std::hash::{BuildHasher, RandomState};

use super::ReplyEvent;
use crate::TokenId;
use crate::chat::dialect::{Parser, Piece};
use crate::engine::Engine;
use crate::generate::sampler::Scored;
use crate::generate::{Answer, Event, FinishReason};
use crate::tokenizer::StreamDecoder;

/// Splits one answer into its parts.
#[derive(Clone, Debug)]
pub(crate) struct Assembler {
    /// `None` if all text is content, and at the end.
    parser: Option<Parser>,
    /// Control tokens that appear in the text.
    shown: Vec<TokenId>,
    /// Whether several calls are allowed.
    parallel: bool,
    /// The prefix of call ids.
    call_ids: Option<String>,
    calls: usize,
    /// Bytes of the text so far, and up to the end of the last reasoning.
    bytes: usize,
    reasoning_bytes: usize,
    /// Scores of tokens whose text has not come yet.
    pending: Vec<Scored>,
    /// Whether the rest of the answer is ignored.
    closed: bool,
}

impl Assembler {
    /// Starts at the answer's beginning. Without a parser, all text is content.
    pub fn new(
        parser: Option<Parser>,
        shown: Vec<TokenId>,
        parallel: bool,
        call_ids: Option<String>,
    ) -> Assembler {
        Assembler {
            parser,
            shown,
            parallel,
            call_ids,
            calls: 0,
            bytes: 0,
            reasoning_bytes: 0,
            pending: Vec::new(),
            closed: false,
        }
    }

    /// Sets the answer's number among the answers to one question, so that its call ids differ from the others'.
    pub fn number(&mut self, number: usize) {
        if let (Some(start), 1..) = (&mut self.call_ids, number) {
            *start = format!("{start}{number}_");
        }
    }

    /// Handles an event of the answer. Returns false if the rest of the answer is not needed.
    pub fn push(&mut self, event: Event<'_>, emit: &mut dyn FnMut(ReplyEvent)) -> bool {
        match event {
            Event::Start(meter) => emit(ReplyEvent::Start(meter.clone())),
            Event::Prompt { done, total } => emit(ReplyEvent::Progress { done, total }),
            Event::Token(scored) => self.pending.push(scored.clone()),
            Event::Text(text) => {
                self.bytes += text.len();
                match self.parser.take() {
                    None => self.piece(Piece::Content(text), emit),
                    Some(mut parser) => {
                        parser.push(text, &mut |piece| self.piece(piece, emit));
                        self.parser = Some(parser);
                    }
                }
            }
        }
        !self.closed
    }

    /// Handles the end of the answer: emits text that was held back, and returns the answer with what only the parser
    /// knows.
    pub fn finish(
        &mut self,
        engine: &Engine,
        mut answer: Answer,
        emit: &mut dyn FnMut(ReplyEvent),
    ) -> Answer {
        if let Some(parser) = self.parser.take() {
            parser.finish(&mut |piece| self.piece(piece, emit));
        }
        answer.stats.reasoning_tokens = self.reasoning_tokens(engine, &answer);
        let cancelled = answer.finish_reason == FinishReason::Cancelled && !self.closed;
        if self.calls > 0 && !cancelled && answer.finish_reason != FinishReason::Length {
            answer.finish_reason = FinishReason::Calls;
        }
        answer
    }

    fn piece(&mut self, piece: Piece<'_>, emit: &mut dyn FnMut(ReplyEvent)) {
        if self.closed {
            return;
        }
        match piece {
            Piece::Reasoning("") | Piece::Content("") | Piece::Arguments("") => {}
            Piece::Reasoning(text) => {
                self.pending.clear();
                self.reasoning_bytes = self.bytes;
                emit(ReplyEvent::Reasoning(text.to_owned()));
            }
            Piece::Content(text) => {
                let scored = std::mem::take(&mut self.pending);
                emit(ReplyEvent::Content { text: text.to_owned(), scored });
            }
            Piece::Call { .. } if self.calls > 0 && !self.parallel => self.closed = true,
            Piece::Call { name } => {
                self.pending.clear();
                let id = match &self.call_ids {
                    Some(start) => format!("{start}{}", self.calls),
                    None => random_id(),
                };
                self.calls += 1;
                emit(ReplyEvent::Call { id, name: name.to_owned() });
            }
            Piece::Arguments(text) => {
                self.pending.clear();
                emit(ReplyEvent::Arguments(text.to_owned()));
            }
        }
    }

    /// The number of tokens up to the end of the last reasoning.
    fn reasoning_tokens(&self, engine: &Engine, answer: &Answer) -> usize {
        if self.reasoning_bytes == 0 {
            return 0;
        }
        let mut decoder = StreamDecoder::continuing(false).showing(self.shown.clone());
        let mut bytes = 0;
        let reached = answer.tokens.iter().position(|token| {
            bytes += decoder.push(engine.tokenizer(), *token).len();
            bytes >= self.reasoning_bytes
        });
        reached.map_or(answer.tokens.len(), |i| i + 1)
    }
}

/// A unique id for a call.
fn random_id() -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    // The standard library seeds its hash keys from the system's random numbers.
    let half = || u128::from(RandomState::new().hash_one(()));
    let bits = half() << 64 | half();
    let letters = (0..24).map(|i| char::from(LETTERS[(bits >> (5 * i)) as usize % 32]));
    "call_".chars().chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::chat::dialect::Dialect;

    const TEXT: &str = "<think>Hm.</think>Well:\n<tool_call>{\"name\": \"now\", \"arguments\": {\"zone\": 1}}</tool_call>\n\
                        <tool_call>{\"name\": \"now\"}</tool_call>";

    fn assembler(parallel: bool, call_ids: Option<&str>) -> Assembler {
        let tools = [json!({ "type": "function", "function": { "name": "now" } })];
        let parser = Dialect::of("<tool_call>{\"name\", \"arguments\"}</tool_call>").parser("", &tools);
        Assembler::new(Some(parser), Vec::new(), parallel, call_ids.map(str::to_owned))
    }

    /// Feeds a text in pieces of this many characters. Returns the joined events, and whether all of the text was
    /// needed.
    fn told(mut assembler: Assembler, text: &str, size: usize) -> (Vec<ReplyEvent>, bool) {
        let mut all: Vec<ReplyEvent> = Vec::new();
        let mut tell = |event| match (all.last_mut(), event) {
            (Some(ReplyEvent::Reasoning(before)), ReplyEvent::Reasoning(more))
            | (Some(ReplyEvent::Arguments(before)), ReplyEvent::Arguments(more)) => before.push_str(&more),
            (Some(ReplyEvent::Content { text, .. }), ReplyEvent::Content { text: more, .. }) => {
                text.push_str(&more)
            }
            (_, event) => all.push(event),
        };
        let pieces: Vec<String> =
            text.chars().collect::<Vec<_>>().chunks(size).map(|piece| piece.iter().collect()).collect();
        let wanted = pieces.iter().all(|piece| assembler.push(Event::Text(piece), &mut tell));
        if let Some(parser) = assembler.parser.take() {
            parser.finish(&mut |piece| assembler.piece(piece, &mut tell));
        }
        (all, wanted)
    }

    #[test]
    fn reasoning_text_and_calls_are_told_apart_however_they_are_cut() {
        let call = |id: &str| ReplyEvent::Call { id: id.into(), name: "now".into() };
        let expected = [
            ReplyEvent::Reasoning("Hm.".into()),
            ReplyEvent::Content { text: "Well:".into(), scored: Vec::new() },
            call("c0"),
            ReplyEvent::Arguments("{\"zone\": 1}".into()),
            call("c1"),
            ReplyEvent::Arguments("{}".into()),
        ];
        for size in [1, 2, 7, 1000] {
            assert_eq!(told(assembler(true, Some("c")), TEXT, size), (expected.to_vec(), true), "{size}");
        }
    }

    #[test]
    fn one_call_is_all_where_several_are_not_wanted() {
        let (events, wanted) = told(assembler(false, None), TEXT, 5);
        assert!(!wanted, "the second call ends the answer");
        let ids: Vec<&String> = events
            .iter()
            .filter_map(|event| if let ReplyEvent::Call { id, .. } = event { Some(id) } else { None })
            .collect();
        assert_eq!(ids.len(), 1);
        assert!(ids[0].starts_with("call_") && ids[0].len() == 29, "{ids:?}");
        assert_ne!(random_id(), random_id());
    }

    #[test]
    fn how_likely_tokens_were_comes_with_the_text_that_they_led_to() {
        let mut assembler = assembler(true, None);
        let scored = |id| Scored { token: TokenId(id), logprob: -0.5, top: Vec::new() };
        let mut told = Vec::new();
        for (id, text) in [(1, "<think>Hm."), (2, "</think>"), (3, "Well"), (4, ""), (5, "!")] {
            let mut tell = |event| told.push(event);
            assembler.push(Event::Token(&scored(id)), &mut tell);
            assembler.push(Event::Text(text), &mut tell);
        }
        let content: Vec<_> = told
            .into_iter()
            .filter_map(|event| match event {
                ReplyEvent::Content { text, scored } => {
                    Some((text, scored.iter().map(|scored| scored.token.0).collect::<Vec<_>>()))
                }
                _ => None,
            })
            .collect();
        // The token that ends reasoning has no text of its own, so it counts as content.
        assert_eq!(content, [("Well".into(), vec![2, 3]), ("!".into(), vec![4, 5])]);
    }
}
