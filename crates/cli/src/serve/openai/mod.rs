//! OpenAI's API.

pub mod chat;
pub mod completions;
mod logprobs;
pub mod models;
pub mod responses;

use serde_json::{Value, json};

use super::error::ApiError;
use super::turn::{Answering, Finish, Format, Timings, TurnEnd, Usage, experts_json};
use crate::openai::{Body, Endpoint};
use forebay_engine::experts::Meters as ExpertMeters;

/// Answers to one request.
const MOST_ANSWERS: u64 = 128;

/// Likeliest tokens that can be told with each.
const MOST_LOGPROBS: usize = 20;

/// How a request's answers are made.
pub fn answering(
    body: &Body,
    endpoint: Endpoint,
    engine: &forebay_engine::Engine,
) -> Result<Answering, ApiError> {
    body.refuse_unknown_ways(endpoint)?;
    let n = body.n.unwrap_or(1);
    if !(1..=MOST_ANSWERS).contains(&n) {
        return Err(ApiError::invalid("n", format!("n is {n}, but must be between 1 and {MOST_ANSWERS}")));
    }
    Ok(Answering {
        more: n as usize - 1,
        max_tokens: body.max_tokens()?,
        reasoning: body.thinking_budget(),
        sampling: body.sampling(engine)?,
        stop: body.stops()?,
        ignore_end: body.ignore_eos == Some(true),
        format: format(body)?,
        logprobs: logprobs_asked(body, endpoint)?,
    })
}

/// What the answer must be. There are two ways to say it, and one may be used.
fn format(body: &Body) -> Result<Format, ApiError> {
    let wrong = |param: &str, message: &str| Err(ApiError::invalid(param, message));
    let present = |field: &Option<Value>| field.clone().filter(|value| !value.is_null());
    let schema = present(&body.json_schema);
    let Some(asked) = present(&body.response_format) else {
        return Ok(schema.map_or(Format::Text, Format::JsonSchema));
    };
    if schema.is_some() {
        return wrong("json_schema", "there is a response_format as well: leave out one of them");
    }
    match asked.get("type").and_then(Value::as_str) {
        Some("text") => Ok(Format::Text),
        Some("json_object") => Ok(present_schema(&asked).map_or(Format::JsonObject, Format::JsonSchema)),
        Some("json_schema") => match asked.get("json_schema").and_then(present_schema) {
            Some(schema) => Ok(Format::JsonSchema(schema)),
            // A name alone describes any object.
            None if asked.get("json_schema").is_some_and(Value::is_object) => Ok(Format::JsonObject),
            None => wrong("response_format.json_schema", "there is no schema"),
        },
        _ => wrong("response_format.type", "the type is text, json_object or json_schema"),
    }
}

fn present_schema(described: &Value) -> Option<Value> {
    described.get("schema").filter(|schema| !schema.is_null()).cloned()
}

/// An error about the schema of the answer, by the name of the field that has it.
fn about_schema(names_schema: bool) -> impl Fn(ApiError) -> ApiError {
    move |error| if names_schema { error.renamed(&[("response_format", "json_schema")]) } else { error }
}

/// A chat asks whether, and how many; a continuation asks how many.
fn logprobs_asked(body: &Body, endpoint: Endpoint) -> Result<Option<usize>, ApiError> {
    let asked = match (endpoint, &body.logprobs) {
        (_, None | Some(Value::Null | Value::Bool(false))) => None,
        (Endpoint::Chat, Some(Value::Bool(true))) => Some(body.top_logprobs.unwrap_or(0)),
        (Endpoint::Completions, Some(Value::Bool(true))) => Some(0),
        (Endpoint::Completions, Some(Value::Number(n))) if n.as_f64().is_some_and(is_count) => {
            n.as_f64().map(|n| n as usize)
        }
        _ => {
            let message = match endpoint {
                Endpoint::Chat => "logprobs is true or false; how many is told by top_logprobs",
                Endpoint::Completions => "logprobs is the number of tokens to tell",
            };
            return Err(ApiError::invalid("logprobs", message));
        }
    };
    match (asked, body.top_logprobs) {
        (None, Some(n)) if n > 0 && endpoint == Endpoint::Chat => {
            Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"))
        }
        (Some(n), _) if n > MOST_LOGPROBS => {
            let param = if endpoint == Endpoint::Chat { "top_logprobs" } else { "logprobs" };
            Err(ApiError::invalid(param, format!("{n} were asked for, but there may be {MOST_LOGPROBS}")))
        }
        (asked, _) => Ok(asked),
    }
}

/// Whether a number counts something, with or without a decimal point.
fn is_count(n: f64) -> bool {
    n >= 0.0 && n.fract() == 0.0
}

fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Calls => "tool_calls",
    }
}

/// What several answers took together.
#[derive(Default)]
struct Total {
    usage: Usage,
    timings: Timings,
    experts: ExpertMeters,
    answers: usize,
}

impl Total {
    /// Adds an answer. The prompt is counted once, of whatever number of answers it has `each`.
    fn add(&mut self, index: usize, each: usize, end: &TurnEnd) {
        let (usage, timings) = (&mut self.usage, &mut self.timings);
        if index.is_multiple_of(each) {
            usage.prompt += end.usage.prompt;
            usage.cached += end.usage.cached;
            timings.prompt += end.timings.prompt;
            timings.cached += end.timings.cached;
        }
        usage.completion += end.usage.completion;
        usage.reasoning += end.usage.reasoning;
        // They were made at the same time.
        timings.prompt_seconds = timings.prompt_seconds.max(end.timings.prompt_seconds);
        timings.predicted += end.timings.predicted;
        timings.predicted_steps += end.timings.predicted_steps;
        timings.predicted_seconds = timings.predicted_seconds.max(end.timings.predicted_seconds);
        if self.answers == 0
            || end.experts.hits + end.experts.misses > self.experts.hits + self.experts.misses
        {
            self.experts = end.experts;
        }
        self.answers += 1;
    }

    fn usage(&self) -> Value {
        let Usage { prompt, cached, completion, reasoning } = self.usage;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": { "cached_tokens": cached },
            "completion_tokens_details": { "reasoning_tokens": reasoning },
        })
    }

    /// Adds to an answer what other servers do not tell, or tell in this way.
    fn extend(&self, answer: &mut Value) {
        answer["timings"] = self.timings.json();
        answer["experts"] = experts_json(&self.experts);
    }
}

/// What all pieces of an answer begin with.
struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    fn with(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}
