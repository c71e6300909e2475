//! Answers as items: the streamed events, and the whole response.

use std::collections::HashMap;

use forebay_engine::internals::generate::sampler::Scored;
use forebay_engine::{Answer, Engine, FinishReason, ReplyEvent, Stats};
use serde_json::{Value, json};

use super::tools::Name;
use crate::error::ApiError;
use crate::openai::answer::tell_measured;
use crate::openai::logprobs;

/// The prefix of `encrypted_content`. The reasoning after it is plain text: the server has nothing to hide from its clients.
pub const PLAIN: &str = "forebay:";

/// An unfinished response.
pub struct Output {
    /// The response without its items.
    response: Value,
    items: Vec<Item>,
    /// The client's names of functions, by the model's names.
    names: HashMap<String, Name>,
    /// Whether the last item is open.
    is_open: bool,
    /// The number of events so far.
    sent: u64,
    /// Whether reasoning has `encrypted_content`.
    carries: bool,
    /// The engine, if the response has logprobs.
    engine: Option<Engine>,
}

struct Item {
    id: String,
    kind: OutputKind,
    text: String,
    status: &'static str,
    /// The logprobs of a message.
    likely: Vec<Value>,
}

enum OutputKind {
    Reasoning,
    Message,
    Call { id: String, function: Name },
}

impl Output {
    pub fn new(
        response: Value,
        names: HashMap<String, Name>,
        carries: bool,
        engine: Option<Engine>,
    ) -> Output {
        Output { response, items: Vec::new(), names, is_open: false, sent: 0, carries, engine }
    }

    /// The first events.
    pub fn start(&mut self) -> Vec<Value> {
        let mut events = Vec::new();
        for name in ["response.created", "response.in_progress"] {
            let response = self.response();
            self.event(&mut events, name, json!({ "response": response }));
        }
        events
    }

    /// Converts an event of the reply to events of this API.
    pub fn take(&mut self, event: ReplyEvent) -> Vec<Value> {
        let mut events = Vec::new();
        match event {
            ReplyEvent::Start(_) | ReplyEvent::Progress { .. } => {}
            ReplyEvent::Reasoning(text) => {
                if !matches!(self.open(), Some(OutputKind::Reasoning)) {
                    self.begin(&mut events, "rs_", OutputKind::Reasoning);
                }
                self.more(&mut events, "response.reasoning_text.delta", &text, &[]);
            }
            ReplyEvent::Content { text, scored } => {
                if !matches!(self.open(), Some(OutputKind::Message)) {
                    self.begin(&mut events, "msg_", OutputKind::Message);
                }
                self.more(&mut events, "response.output_text.delta", &text, &scored);
            }
            ReplyEvent::Call { id, name } => {
                let function = self.names.get(&name).cloned().unwrap_or_else(|| Name::new(None, &name));
                self.begin(&mut events, "fc_", OutputKind::Call { id, function });
            }
            ReplyEvent::Arguments(text) => {
                self.more(&mut events, "response.function_call_arguments.delta", &text, &[]);
            }
            ReplyEvent::End(answer) => self.end(&mut events, &answer),
        }
        events
    }

    /// The events after a failure.
    pub fn fail(&mut self, error: &ApiError) -> Vec<Value> {
        let mut events = Vec::new();
        self.close(&mut events, "incomplete");
        self.response["status"] = "failed".into();
        self.response["error"] = json!({ "code": "server_error", "message": error.message });
        let response = self.response();
        self.event(&mut events, "response.failed", json!({ "response": response }));
        events
    }

    /// The response so far.
    pub fn response(&self) -> Value {
        let mut response = self.response.clone();
        response["output"] = self.items.iter().map(|item| item.json(self.carries)).collect();
        response
    }

    fn open(&self) -> Option<&OutputKind> {
        self.items.last().filter(|_| self.is_open).map(|item| &item.kind)
    }

    fn begin(&mut self, events: &mut Vec<Value>, prefix: &str, kind: OutputKind) {
        self.close(events, "completed");
        let id = crate::app::id(prefix);
        let item = Item { id, kind, text: String::new(), status: "in_progress", likely: Vec::new() };
        let part = item.part();
        let mut begun = item.json(false);
        if part.is_some() {
            begun["content"] = json!([]);
        }
        self.items.push(item);
        self.is_open = true;
        let index = self.items.len() - 1;
        self.event(events, "response.output_item.added", json!({ "output_index": index, "item": begun }));
        if let Some(part) = part {
            self.tell(events, "response.content_part.added", "part", part);
        }
    }

    /// Adds text to the last item.
    fn more(&mut self, events: &mut Vec<Value>, name: &str, text: &str, scored: &[Scored]) {
        let likely = self.likely(scored);
        if let Some(item) = self.items.last_mut() {
            item.text.push_str(text);
            item.likely.extend(likely.iter().cloned());
        }
        self.tell(events, name, "delta", text.into());
        if let (Some(OutputKind::Message), Some(event)) = (self.open(), events.last_mut()) {
            event["logprobs"] = likely.into();
        }
    }

    /// The logprobs of the new tokens.
    fn likely(&self, scored: &[Scored]) -> Vec<Value> {
        let Some(engine) = &self.engine else { return Vec::new() };
        match logprobs::chat(engine.tokenizer(), scored)["content"].take() {
            Value::Array(likely) => likely,
            _ => Vec::new(),
        }
    }

    fn close(&mut self, events: &mut Vec<Value>, status: &'static str) {
        let Some(item) = self.items.last_mut().filter(|_| self.is_open) else { return };
        item.status = status;
        if matches!(item.kind, OutputKind::Call { .. }) && item.text.is_empty() && status == "completed" {
            // A call without arguments gets an empty object.
            item.text.push_str("{}");
        }
        let (text, likely, part) = (item.text.clone(), item.likely.clone(), item.part());
        let (name, field) = match item.kind {
            OutputKind::Reasoning => ("response.reasoning_text.done", "text"),
            OutputKind::Message => ("response.output_text.done", "text"),
            OutputKind::Call { .. } => ("response.function_call_arguments.done", "arguments"),
        };
        let (item, is_message) = (item.json(self.carries), matches!(item.kind, OutputKind::Message));
        self.tell(events, name, field, text.into());
        if let (true, Some(event)) = (is_message, events.last_mut()) {
            event["logprobs"] = likely.into();
        }
        if let Some(part) = part {
            self.tell(events, "response.content_part.done", "part", part);
        }
        let index = self.items.len() - 1;
        self.event(events, "response.output_item.done", json!({ "output_index": index, "item": item }));
        self.is_open = false;
    }

    fn end(&mut self, events: &mut Vec<Value>, answer: &Answer) {
        let was_cut = answer.finish_reason == FinishReason::Length;
        let (status, name) = match was_cut {
            true => ("incomplete", "response.incomplete"),
            false => ("completed", "response.completed"),
        };
        self.close(events, status);
        self.response["status"] = status.into();
        if was_cut {
            self.response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        } else {
            self.response["completed_at"] = crate::app::now().into();
        }
        self.response["usage"] = usage(&answer.stats);
        tell_measured(&answer.stats, &mut self.response);
        let response = self.response();
        self.event(events, name, json!({ "response": response }));
    }

    /// An event about the last item or its only part.
    fn tell(&mut self, events: &mut Vec<Value>, name: &str, field: &str, value: Value) {
        let Some(item) = self.items.last() else { return };
        let mut fields = json!({ "item_id": item.id, "output_index": self.items.len() - 1 });
        if !matches!(item.kind, OutputKind::Call { .. }) {
            fields["content_index"] = 0.into();
        } else if let (OutputKind::Call { function, .. }, "arguments") = (&item.kind, field) {
            fields["name"] = function.name.as_str().into();
        }
        fields[field] = value;
        self.event(events, name, fields);
    }

    fn event(&mut self, events: &mut Vec<Value>, name: &str, mut fields: Value) {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sent.into();
        self.sent += 1;
        events.push(fields);
    }
}

impl Item {
    fn json(&self, carries: bool) -> Value {
        match &self.kind {
            OutputKind::Reasoning => {
                let mut item = json!({
                    "id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": [self.part()],
                });
                if carries {
                    item["encrypted_content"] = format!("{PLAIN}{}", self.text).into();
                }
                item
            }
            OutputKind::Message => json!({
                "id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": [self.part()],
            }),
            OutputKind::Call { id, function } => {
                let mut item = json!({
                    "id": self.id, "type": "function_call", "status": self.status, "call_id": id,
                    "name": function.name, "arguments": self.text,
                });
                if let Some(namespace) = &function.namespace {
                    item["namespace"] = namespace.as_str().into();
                }
                item
            }
        }
    }

    /// The only part of the item's content; a call has none.
    fn part(&self) -> Option<Value> {
        match self.kind {
            OutputKind::Reasoning => Some(json!({ "type": "reasoning_text", "text": self.text })),
            OutputKind::Message => Some(json!({
                "type": "output_text", "text": self.text, "annotations": [], "logprobs": self.likely,
            })),
            OutputKind::Call { .. } => None,
        }
    }
}

fn usage(stats: &Stats) -> Value {
    json!({
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": { "cached_tokens": stats.reused_tokens, "cache_write_tokens": 0 },
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": { "reasoning_tokens": stats.reasoning_tokens },
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::answer::tests::{content, end};

    fn output() -> Output {
        let names = HashMap::from([("n__g".to_owned(), Name::new(Some("n"), "g"))]);
        Output::new(json!({ "id": "resp_1", "status": "in_progress", "output": [] }), names, true, None)
    }

    #[test]
    fn each_item_is_told_from_its_beginning_to_its_end() {
        let mut output = output();
        let mut events = output.start();
        for happened in [
            ReplyEvent::Progress { done: 1, total: 2 },
            ReplyEvent::Reasoning("Hm.".into()),
            content("Yes"),
            content("!"),
            ReplyEvent::Call { id: "call_1".into(), name: "f".into() },
            ReplyEvent::Arguments("{\"x\":".into()),
            ReplyEvent::Arguments("1}".into()),
            ReplyEvent::Call { id: "call_2".into(), name: "n__g".into() },
            end(FinishReason::Calls, None),
        ] {
            events.extend(output.take(happened));
        }
        let names: Vec<_> =
            events.iter().map(|event| event["type"].as_str().unwrap().replace("response.", "")).collect();
        assert_eq!(
            names.join(" "),
            "created in_progress \
             output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done output_item.done \
             output_item.added content_part.added output_text.delta output_text.delta output_text.done content_part.done \
             output_item.done \
             output_item.added function_call_arguments.delta function_call_arguments.delta function_call_arguments.done \
             output_item.done output_item.added function_call_arguments.done output_item.done completed"
        );
        for (i, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], i);
        }
        let added = &events[8];
        assert_eq!((&added["output_index"], &added["item"]["content"]), (&json!(1), &json!([])));
        assert_eq!(events[12]["text"], "Yes!");
        let response = output.response();
        assert_eq!(events.last().unwrap()["response"], response);
        assert_eq!(response["output"][0]["encrypted_content"], "forebay:Hm.");
        assert_eq!(response["output"][1]["content"][0]["text"], "Yes!");
        assert_eq!(response["output"][2]["arguments"], "{\"x\":1}");
        assert_eq!(
            (&response["output"][3]["arguments"], &response["output"][3]["call_id"]),
            (&json!("{}"), &json!("call_2"))
        );
        // The function of a namespace is called by the name that the client knows.
        let name = |item: &Value| (item["namespace"].clone(), item["name"].clone());
        assert_eq!(name(&response["output"][2]), (Value::Null, json!("f")));
        assert_eq!(name(&response["output"][3]), (json!("n"), json!("g")));
        assert_eq!(
            (&response["status"], &response["usage"]["total_tokens"]),
            (&json!("completed"), &json!(15))
        );
    }

    #[test]
    fn an_answer_that_was_cut_off_is_incomplete() {
        let mut output = output();
        output.start();
        output.take(content("Once"));
        let events = output.take(end(FinishReason::Length, None));
        assert_eq!(events.last().unwrap()["type"], "response.incomplete");
        let response = output.response();
        assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!(response["output"][0]["status"], "incomplete");
    }

    #[test]
    fn a_failure_is_told_with_what_there_was() {
        let mut output = output();
        output.start();
        output.take(content("Once"));
        let events = output.fail(&ApiError::internal("broken"));
        let last = events.last().unwrap();
        assert_eq!(
            (&last["type"], &last["response"]["error"]["message"]),
            (&json!("response.failed"), &json!("broken"))
        );
        assert_eq!(last["response"]["output"][0]["content"][0]["text"], "Once");
    }
}
