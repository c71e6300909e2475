//! Answers in the form of Anthropic's API: the streamed events, and the whole message.

use forebay_engine::{Answer as Written, FinishReason, ReplyEvent, Stats};
use serde_json::{Value, json};

use crate::openai::answer::tell_measured;

/// The signature of reasoning, which clients send back. The server does not check it.
const SIGNATURE: &str = "forebay";

/// An unfinished answer.
pub struct Answer {
    id: String,
    model: String,
    prompt_tokens: usize,
    /// Whether clients receive the reasoning, or only empty thinking blocks.
    shows_thinking: bool,
    blocks: Vec<Block>,
    /// Whether the last block is open.
    is_open: bool,
    /// The whole answer, at the end.
    written: Option<Box<Written>>,
}

/// A part of an answer.
enum Block {
    Thinking(String),
    Text(String),
    ToolUse { id: String, name: String, input: String },
}

impl Answer {
    pub fn new(model: &str, prompt_tokens: usize, shows_thinking: bool) -> Answer {
        let (id, model) = (crate::app::id("msg_"), model.to_owned());
        Answer { id, model, prompt_tokens, shows_thinking, blocks: Vec::new(), is_open: false, written: None }
    }

    /// The first event.
    pub fn start(&self) -> Value {
        json!({ "type": "message_start", "message": self.message() })
    }

    /// Converts an event of the reply to events of this API.
    pub fn take(&mut self, event: ReplyEvent) -> Vec<Value> {
        let mut events = Vec::new();
        match event {
            ReplyEvent::Start(_) | ReplyEvent::Progress { .. } => {}
            ReplyEvent::Reasoning(text) => {
                if !matches!(self.open(), Some(Block::Thinking(_))) {
                    self.begin(Block::Thinking(String::new()), &mut events);
                }
                if self.shows_thinking {
                    events.push(self.delta(json!({ "type": "thinking_delta", "thinking": text })));
                    if let Some(Block::Thinking(thought)) = self.open() {
                        thought.push_str(&text);
                    }
                }
            }
            ReplyEvent::Content { text, .. } => {
                if !matches!(self.open(), Some(Block::Text(_))) {
                    self.begin(Block::Text(String::new()), &mut events);
                }
                events.push(self.delta(json!({ "type": "text_delta", "text": text })));
                if let Some(Block::Text(said)) = self.open() {
                    said.push_str(&text);
                }
            }
            ReplyEvent::Call { name, .. } => {
                let id = crate::app::id("toolu_");
                self.begin(Block::ToolUse { id, name, input: String::new() }, &mut events);
            }
            ReplyEvent::Arguments(text) => {
                events.push(self.delta(json!({ "type": "input_json_delta", "partial_json": text })));
                if let Some(Block::ToolUse { input, .. }) = self.open() {
                    input.push_str(&text);
                }
            }
            ReplyEvent::End(written) => {
                self.close(&mut events);
                self.written = Some(written);
                let message = self.message();
                let mut delta = json!({
                    "type": "message_delta",
                    "delta": { "stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"] },
                });
                for field in ["usage", "timings", "experts"] {
                    delta[field] = message[field].clone();
                }
                events.push(delta);
                events.push(json!({ "type": "message_stop" }));
            }
        }
        events
    }

    /// The message so far.
    pub fn message(&self) -> Value {
        let content: Vec<Value> = self.blocks.iter().filter_map(Block::json).collect();
        let mut message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
        });
        match &self.written {
            None => {
                message["usage"] = usage(&Stats { prompt_tokens: self.prompt_tokens, ..Stats::default() });
            }
            Some(written) => {
                let stopped = written.finish_reason == FinishReason::Stop;
                message["stop_reason"] = stop_reason(written).into();
                message["stop_sequence"] = json!(written.stop.as_ref().filter(|_| stopped));
                message["usage"] = usage(&written.stats);
                tell_measured(&written.stats, &mut message);
            }
        }
        message
    }

    /// The open block.
    fn open(&mut self) -> Option<&mut Block> {
        self.blocks.last_mut().filter(|_| self.is_open)
    }

    fn begin(&mut self, block: Block, events: &mut Vec<Value>) {
        self.close(events);
        let begun = match &block {
            Block::Thinking(_) => json!({ "type": "thinking", "thinking": "", "signature": "" }),
            Block::Text(_) => json!({ "type": "text", "text": "" }),
            Block::ToolUse { id, name, .. } => {
                json!({ "type": "tool_use", "id": id, "name": name, "input": {} })
            }
        };
        events.push(
            json!({ "type": "content_block_start", "index": self.blocks.len(), "content_block": begun }),
        );
        self.blocks.push(block);
        self.is_open = true;
    }

    fn close(&mut self, events: &mut Vec<Value>) {
        match self.open() {
            None => return,
            Some(Block::Thinking(_)) => {
                events.push(self.delta(json!({ "type": "signature_delta", "signature": SIGNATURE })));
            }
            Some(Block::Text(_) | Block::ToolUse { .. }) => {}
        }
        events.push(json!({ "type": "content_block_stop", "index": self.last() }));
        self.is_open = false;
    }

    fn delta(&self, delta: Value) -> Value {
        json!({ "type": "content_block_delta", "index": self.last(), "delta": delta })
    }

    fn last(&self) -> usize {
        self.blocks.len().saturating_sub(1)
    }
}

impl Block {
    /// The block in a whole message; `None` for a truncated call, which clients cannot use.
    fn json(&self) -> Option<Value> {
        match self {
            Block::Thinking(thought) => {
                Some(json!({ "type": "thinking", "thinking": thought, "signature": SIGNATURE }))
            }
            Block::Text(text) => Some(json!({ "type": "text", "text": text })),
            Block::ToolUse { id, name, input } => {
                let input: Value = serde_json::from_str(if input.is_empty() { "{}" } else { input }).ok()?;
                Some(json!({ "type": "tool_use", "id": id, "name": name, "input": input }))
            }
        }
    }
}

fn stop_reason(written: &Written) -> &'static str {
    match written.finish_reason {
        FinishReason::Calls => "tool_use",
        FinishReason::Length => "max_tokens",
        FinishReason::Stop if written.stop.is_some() => "stop_sequence",
        FinishReason::Stop | FinishReason::Cancelled => "end_turn",
    }
}

/// The token counts. Cached tokens are counted separately, and none are counted as written to the cache.
fn usage(stats: &Stats) -> Value {
    json!({
        "input_tokens": stats.prompt_tokens - stats.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.reused_tokens,
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": { "thinking_tokens": stats.reasoning_tokens },
        "service_tier": "standard",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::answer::tests::{content, end};

    fn types(events: &[Value]) -> Vec<String> {
        let name = |event: &Value| match event["delta"]["type"].as_str() {
            Some(delta) => delta.to_owned(),
            None => event["type"].as_str().unwrap().to_owned(),
        };
        events.iter().map(name).collect()
    }

    #[test]
    fn reasoning_text_and_calls_are_blocks_of_their_own() {
        let mut answer = Answer::new("m", 10, true);
        assert_eq!(answer.start()["message"]["usage"]["input_tokens"], 10);
        let call = |name: &str| ReplyEvent::Call { id: "call_x".into(), name: name.into() };
        let happened = [
            ReplyEvent::Progress { done: 1, total: 10 },
            ReplyEvent::Reasoning("Let ".into()),
            ReplyEvent::Reasoning("me.".into()),
            content("Yes"),
            content("!"),
            call("a"),
            ReplyEvent::Arguments("{\"x\":".into()),
            ReplyEvent::Arguments(" 1}".into()),
            call("b"),
            end(FinishReason::Calls, None),
        ];
        let events: Vec<_> = happened.into_iter().flat_map(|event| answer.take(event)).collect();
        let expected = "content_block_start thinking_delta thinking_delta signature_delta content_block_stop \
                        content_block_start text_delta text_delta content_block_stop \
                        content_block_start input_json_delta input_json_delta content_block_stop \
                        content_block_start content_block_stop message_delta message_stop";
        assert_eq!(types(&events).join(" "), expected);
        assert_eq!(events[9]["index"], 2);
        let message = answer.message();
        assert_eq!(message["content"][0]["thinking"], "Let me.");
        assert_eq!(message["content"][1], json!({ "type": "text", "text": "Yes!" }));
        assert_eq!(message["content"][2]["input"], json!({ "x": 1 }));
        assert_eq!(message["content"][3]["input"], json!({}));
        assert_ne!(message["content"][2]["id"], message["content"][3]["id"]);
        assert_eq!(message["stop_reason"], "tool_use");
        assert_eq!(
            (&message["usage"]["input_tokens"], &message["usage"]["cache_read_input_tokens"]),
            (&json!(6), &json!(4))
        );
    }

    #[test]
    fn thoughts_that_are_to_be_omitted_leave_an_empty_block() {
        let mut answer = Answer::new("m", 10, false);
        let happened = [ReplyEvent::Reasoning("Hm.".into()), content("Yes"), end(FinishReason::Stop, None)];
        let events: Vec<_> = happened.into_iter().flat_map(|event| answer.take(event)).collect();
        let expected = "content_block_start signature_delta content_block_stop \
                        content_block_start text_delta content_block_stop message_delta message_stop";
        assert_eq!(types(&events).join(" "), expected);
        assert_eq!(answer.message()["content"][0]["thinking"], "");
        assert_eq!(answer.message()["content"][1]["text"], "Yes");
    }

    #[test]
    fn the_reason_for_the_end_is_told() {
        for (finish, stop, reason, sequence) in [
            (FinishReason::Stop, None, "end_turn", Value::Null),
            (FinishReason::Stop, Some("END"), "stop_sequence", json!("END")),
            (FinishReason::Length, None, "max_tokens", Value::Null),
        ] {
            let mut answer = Answer::new("m", 10, true);
            let events = answer.take(end(finish, stop));
            assert_eq!(events[0]["delta"], json!({ "stop_reason": reason, "stop_sequence": sequence }));
            assert_eq!(answer.message()["stop_reason"], reason);
        }
    }

    #[test]
    fn a_call_that_was_cut_off_is_no_part_of_a_whole_message() {
        let mut answer = Answer::new("m", 10, true);
        answer.take(ReplyEvent::Call { id: "x".into(), name: "a".into() });
        answer.take(ReplyEvent::Arguments("{\"x\": [".into()));
        answer.take(end(FinishReason::Length, None));
        assert_eq!(answer.message()["content"], json!([]));
    }
}
