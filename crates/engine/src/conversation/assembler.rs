//! From the text of an answer, as it comes, to what it is.

use std::hash::{BuildHasher, RandomState};

use super::ReplyEvent;
use crate::TokenId;
use crate::chat::dialect::{Parser, Piece};
use crate::engine::Engine;
use crate::generate::sampler::Scored;
use crate::generate::{Answer, Event, FinishReason};
use crate::tokenizer::StreamDecoder;

/// Tells the parts of one answer apart.
#[derive(Clone, Debug)]
pub(crate) struct Assembler {
    /// `None` where all is content, and at the end.
    parser: Option<Parser>,
    /// Control tokens that are part of the text.
    shown: Vec<TokenId>,
    /// Whether there may be several calls.
    parallel: bool,
    /// What the ids of calls begin with.
    call_ids: Option<String>,
    calls: usize,
    /// Bytes of the text so far, and how many of them there were when reasoning came last.
    bytes: usize,
    reasoning_bytes: usize,
    /// Of tokens whose text has not come.
    pending: Vec<Scored>,
    /// Whether what comes is not wanted any more.
    closed: bool,
}

impl Assembler {
    /// Reads with this parser, at the answer's beginning; without one all is content.
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

    /// Reads the answer of this number to the same question: its calls have ids of their own.
    pub fn number(&mut self, number: usize) {
        if let (Some(start), 1..) = (&mut self.call_ids, number) {
            *start = format!("{start}{number}_");
        }
    }

    /// Takes what happens to the answer. Gives whether more of it is wanted.
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

    /// Takes the answer's end: passes on what was held back, and gives the answer with what only who reads it knows.
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

    /// Tokens up to where reasoning came last.
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

/// The id of a call, which no other call has.
fn random_id() -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    // The system's randomness, by way of the keys that the standard library hashes with.
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

    /// What is told of a text that comes in pieces of so many characters, joined, and whether all was wanted.
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
        // The token that ends reasoning has no text of its own, so it counts as the content's.
        assert_eq!(content, [("Well".into(), vec![2, 3]), ("!".into(), vec![4, 5])]);
    }
}
