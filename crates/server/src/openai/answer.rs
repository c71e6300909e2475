//! Answers in the form of OpenAI's API.

use forebay_engine::chat::Message;
use forebay_engine::internals::experts::Meters as ExpertMeters;
use forebay_engine::tokenizer::Tokenizer;
use forebay_engine::{FinishReason, Reply, Stats};
use serde_json::{Value, json};

use super::{Endpoint, completions, logprobs};
use crate::app::{id, now};

/// The form of the answers to a body.
#[derive(Debug)]
pub struct Form {
    /// The kind of the body.
    pub endpoint: Endpoint,
    /// Answers to each prompt, ordered by prompt.
    pub each: usize,
    /// Whether the answers have logprobs.
    pub(crate) is_scored: bool,
    /// The prompts, if they are part of the answers.
    pub(crate) echoed: Option<Vec<String>>,
}

/// The fields that all chunks of an answer share.
pub struct Envelope {
    /// The id of the answer.
    pub id: String,
    /// When the answer began, in seconds since 1970.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The form of the answers.
    pub form: Form,
    /// Whether the answer is streamed.
    pub is_stream: bool,
}

impl Envelope {
    /// An envelope with a new id, from now.
    pub(crate) fn new(model: &str, form: Form, is_stream: bool) -> Envelope {
        let id = id(form.endpoint.prefix());
        Envelope { id, created: now(), model: model.to_owned(), form, is_stream }
    }

    /// An object with these choices.
    pub(crate) fn with(&self, choices: Value) -> Value {
        let object = match (self.form.endpoint, self.is_stream) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Chat, true) => "chat.completion.chunk",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    /// The body of all answers together.
    pub fn whole(&self, replies: &[Reply], tokenizer: &Tokenizer) -> Value {
        let choices = replies.iter().enumerate().map(|(index, reply)| match self.form.endpoint {
            Endpoint::Chat => {
                let likely = self.form.is_scored.then(|| logprobs::chat(tokenizer, &reply.scored));
                let finish = finish_reason(reply.answer.finish_reason);
                json!({ "index": index, "message": message(reply), "logprobs": likely, "finish_reason": finish })
            }
            Endpoint::Completions => {
                let text = format!("{}{}", self.form.echoed(index), reply.content);
                let likely =
                    self.form.is_scored.then(|| logprobs::completions(tokenizer, &reply.scored, &mut 0));
                completions::choice(index, &text, likely.unwrap_or_default(), Some(reply.answer.finish_reason))
            }
        });
        let mut body = self.with(choices.collect());
        self.total(replies).tell_usage(&mut body);
        body
    }

    /// The same with the measured fields.
    pub(crate) fn measured(&self, replies: &[Reply], tokenizer: &Tokenizer) -> Value {
        let mut body = self.whole(replies, tokenizer);
        self.total(replies).tell_measured(&mut body);
        body
    }

    fn total(&self, replies: &[Reply]) -> Total {
        let mut total = Total::default();
        for (index, reply) in replies.iter().enumerate() {
            total.add(index, self.form.each, &reply.answer.stats);
        }
        total
    }
}

impl Form {
    /// The prompt, if it is part of the answer.
    pub(crate) fn echoed(&self, index: usize) -> &str {
        self.echoed.as_ref().map_or("", |texts| &texts[index / self.each])
    }
}

/// The finish reason in this API.
pub fn finish_reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop | FinishReason::Cancelled => "stop",
        FinishReason::Length => "length",
        FinishReason::Calls => "tool_calls",
    }
}

fn message(reply: &Reply) -> Value {
    let Message { role, content, extra } = reply.message();
    let mut message = json!({ "role": role, "content": content, "refusal": null });
    if let Value::Object(fields) = &mut message {
        fields.extend(extra);
    }
    message
}

/// The statistics of several answers together.
#[derive(Default)]
pub struct Total {
    stats: Stats,
    answers: usize,
}

impl Total {
    /// Adds an answer. A prompt with `each` answers counts once.
    pub fn add(&mut self, index: usize, each: usize, stats: &Stats) {
        let total = &mut self.stats;
        if index.is_multiple_of(each) {
            total.prompt_tokens += stats.prompt_tokens;
            total.reused_tokens += stats.reused_tokens;
        }
        total.generated_tokens += stats.generated_tokens;
        total.reasoning_tokens += stats.reasoning_tokens;
        total.decode_steps += stats.decode_steps;
        // The answers ran at the same time.
        total.prompt_seconds = total.prompt_seconds.max(stats.prompt_seconds);
        total.decode_seconds = total.decode_seconds.max(stats.decode_seconds);
        let asked = |meters: &ExpertMeters| meters.hits + meters.misses;
        if self.answers == 0 || asked(&stats.experts) > asked(&total.experts) {
            total.experts = stats.experts;
        }
        self.answers += 1;
    }

    /// Adds `usage` to an answer.
    pub fn tell_usage(&self, answer: &mut Value) {
        let Stats { prompt_tokens, reused_tokens, generated_tokens, reasoning_tokens, .. } = self.stats;
        answer["usage"] = json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated_tokens,
            "total_tokens": prompt_tokens + generated_tokens,
            "prompt_tokens_details": { "cached_tokens": reused_tokens },
            "completion_tokens_details": { "reasoning_tokens": reasoning_tokens },
        });
    }

    /// Adds the measured fields to an answer.
    pub fn tell_measured(&self, answer: &mut Value) {
        tell_measured(&self.stats, answer);
    }
}

/// Adds the measured fields to an answer.
pub fn tell_measured(stats: &Stats, answer: &mut Value) {
    answer["timings"] = timings(stats);
    answer["experts"] = experts(&stats.experts);
}

/// The times of an answer, under the names of llama.cpp's server.
fn timings(stats: &Stats) -> Value {
    let per_second = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
    let per_token = |n: usize, seconds: f64| if n > 0 { seconds * 1000.0 / n as f64 } else { 0.0 };
    let computed = stats.prompt_tokens - stats.reused_tokens;
    json!({
        "cache_n": stats.reused_tokens,
        "prompt_n": computed,
        "prompt_ms": stats.prompt_seconds * 1000.0,
        "prompt_per_token_ms": per_token(computed, stats.prompt_seconds),
        "prompt_per_second": per_second(computed, stats.prompt_seconds),
        "predicted_n": stats.generated_tokens,
        "predicted_ms": stats.decode_seconds * 1000.0,
        // The first token comes from prompt processing.
        "predicted_per_token_ms": per_token(stats.decode_steps, stats.decode_seconds),
        "predicted_per_second": per_second(stats.decode_steps, stats.decode_seconds),
    })
}

/// What the expert cache did during the answer, for all requests together.
fn experts(meters: &ExpertMeters) -> Value {
    json!({
        "hit_rate": meters.hit_rate(),
        "hits": meters.hits,
        "gpu_hits": meters.device_hits,
        "cpu_experts": meters.computed_in_memory,
        "misses": meters.misses,
        "bytes_read": meters.bytes_read,
        "bytes_uploaded": meters.bytes_lifted,
        "wait_ms": meters.wait_seconds * 1000.0,
        "copy_wait_ms": meters.copy_wait_seconds * 1000.0,
    })
}

#[cfg(test)]
pub mod tests {
    use forebay_engine::{Answer, ReplyEvent};

    use super::*;

    /// More text of an answer.
    pub fn content(text: &str) -> ReplyEvent {
        ReplyEvent::Content { text: text.into(), scored: Vec::new() }
    }

    /// The end of an answer of five tokens, two of them of reasoning, to a prompt of ten, of which four were known.
    pub fn end(finish_reason: FinishReason, stop: Option<&str>) -> ReplyEvent {
        ReplyEvent::End(Box::new(Answer {
            text: String::new(),
            tokens: Vec::new(),
            finish_reason,
            stop: stop.map(str::to_owned),
            seed: 0,
            stats: Stats {
                prompt_tokens: 10,
                reused_tokens: 4,
                generated_tokens: 5,
                reasoning_tokens: 2,
                ..Stats::default()
            },
            logprobs: Vec::new(),
        }))
    }

    #[test]
    fn a_prompt_is_counted_once_for_all_of_its_answers() {
        let ReplyEvent::End(answer) = end(FinishReason::Stop, None) else { unreachable!() };
        let mut total = Total::default();
        (0..4).for_each(|index| total.add(index, 2, &answer.stats));
        let mut body = json!({});
        total.tell_usage(&mut body);
        let usage = &body["usage"];
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(20), &json!(20)));
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 8);
    }
}
