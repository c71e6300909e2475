//! Requests and answers in the words of OpenAI's API.

use std::collections::BTreeMap;

use forebay_engine::chat::Message;
use forebay_engine::chat::dialect::{Parser, Piece};
use forebay_engine::sampler::{SamplingOverrides, SamplingParams};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Answer, Engine, FinishReason, Request, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::prompting::{Prompt, Prompting};

/// What cannot be answered, and which field is the reason.
#[derive(Debug)]
pub struct Refusal {
    pub message: String,
    pub param: Option<&'static str>,
}

impl Refusal {
    pub fn new(param: &'static str, message: impl Into<String>) -> Refusal {
        Refusal { message: message.into(), param: Some(param) }
    }

    /// An error in OpenAI's shape.
    pub fn body(&self) -> Value {
        let Refusal { message, param } = self;
        let error = json!({
            "message": message, "type": "invalid_request_error", "param": param, "code": null,
        });
        json!({ "error": error })
    }
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A chat's next message.
    Chat,
    /// A text, continued as it is.
    Completions,
}

impl Endpoint {
    const ALL: [(&'static str, Endpoint); 2] =
        [("/v1/chat/completions", Endpoint::Chat), ("/v1/completions", Endpoint::Completions)];

    /// That of an address; a chat if none is given.
    pub fn of(url: Option<&str>) -> Result<Endpoint, Refusal> {
        let Some(url) = url else { return Ok(Endpoint::Chat) };
        Endpoint::ALL.into_iter().find(|(known, _)| *known == url).map(|(_, endpoint)| endpoint).ok_or_else(
            || {
                let known = Endpoint::ALL.map(|(known, _)| known).join(" and ");
                Refusal::new("url", format!("{url} is not answered here, only {known}"))
            },
        )
    }
}

/// The body of a request. Fields that are not here are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Body {
    messages: Vec<Message>,
    prompt: Option<String>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repeat_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<u64>,
    stop: Option<Stop>,
    tools: Option<Vec<Value>>,
    chat_template_kwargs: Option<Map<String, Value>>,
    // Known, and not supported here:
    n: Option<u64>,
    stream: Option<bool>,
    logprobs: Option<bool>,
    response_format: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

impl Body {
    /// The request for an engine, and what tells the parts of the answer apart where there are any. Without a seed, `seed`
    /// is used.
    pub fn request(
        &self,
        engine: &Engine,
        endpoint: Endpoint,
        seed: u64,
    ) -> Result<(Request, Option<Parser>), Refusal> {
        self.refuse_others()?;
        let mut shown = Vec::new();
        let (param, tokens, parser) = match endpoint {
            Endpoint::Chat => {
                let prompting = self.prompting();
                let Prompt { text, tokens } = self.chat_prompt(engine, &prompting)?;
                let dialect = prompting
                    .dialect(engine)
                    .map_err(|error| Refusal::new("messages", format!("{error:#}")))?;
                shown = dialect.shown(&prompting.tools);
                ("messages", tokens, Some(dialect.parser(&text, &prompting.tools)))
            }
            Endpoint::Completions => {
                let text = self.prompt.as_deref().unwrap_or_default();
                let options = EncodeOptions { special: true, bos: Bos::AsFileSays };
                let tokens = engine.tokenizer().encode(text, options);
                ("prompt", tokens.map_err(|error| Refusal::new("prompt", error.to_string()))?, None)
            }
        };
        if tokens.is_empty() {
            return Err(Refusal::new(param, "there is nothing to answer"));
        }
        let limit = engine.context();
        if tokens.len() >= limit {
            let message =
                format!("the messages have {} tokens, the context of the model {limit}", tokens.len());
            return Err(Refusal::new("messages", message));
        }
        let request = Request {
            prompt: tokens,
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            sampling: self.sampling(engine, seed)?,
            stop: match &self.stop {
                None => Vec::new(),
                Some(Stop::One(text)) => vec![text.clone()],
                Some(Stop::Several(texts)) => texts.clone(),
            },
            shown,
            ..Request::default()
        };
        Ok((request, parser))
    }

    /// How the messages become a prompt.
    fn prompting(&self) -> Prompting {
        let mut prompting = Prompting::default();
        prompting.kwargs.extend(self.chat_template_kwargs.clone().unwrap_or_default());
        prompting.tools = self.tools.clone().unwrap_or_default();
        prompting
    }

    fn chat_prompt(&self, engine: &Engine, prompting: &Prompting) -> Result<Prompt, Refusal> {
        if self.messages.is_empty() {
            return Err(Refusal::new("messages", "there are no messages"));
        }
        prompting
            .prompt(engine, &self.messages)
            .map_err(|error| Refusal::new("messages", format!("{error:#}")))
    }

    fn sampling(&self, engine: &Engine, seed: u64) -> Result<SamplingParams, Refusal> {
        let refused = |message: String| Refusal { message, param: None };
        let bias = self.logit_bias.iter().flatten().map(|(token, bias)| match token.parse() {
            Ok(id) if (id as usize) < engine.vocab_size() => Ok((TokenId(id), *bias)),
            _ => Err(Refusal::new("logit_bias", format!("{token} is not a token of the model"))),
        });
        let overrides = SamplingOverrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last_n: None,
            logit_bias: Some(bias.collect::<Result<Vec<_>, _>>()?),
            seed: Some(self.seed.unwrap_or(seed)),
        };
        let file = engine.file();
        let sampling = overrides.resolve(&file.metadata, file.path()).map_err(|e| refused(e.to_string()))?;
        sampling.validate().map_err(|e| refused(e.to_string()))?;
        Ok(sampling)
    }

    fn refuse_others(&self) -> Result<(), Refusal> {
        let text = |format: &Value| format.get("type").and_then(Value::as_str) == Some("text");
        if self.n.is_some_and(|n| n != 1) {
            return Err(Refusal::new("n", "only one answer can be asked for"));
        }
        if self.stream == Some(true) {
            return Err(Refusal::new("stream", "answers to a file are not streamed"));
        }
        if self.logprobs == Some(true) {
            return Err(Refusal::new("logprobs", "probabilities are not supported"));
        }
        if self.response_format.as_ref().is_some_and(|format| !text(format)) {
            return Err(Refusal::new("response_format", "only text is supported"));
        }
        Ok(())
    }
}

/// An answer in OpenAI's shape, its parts told apart by the parser where there are any.
pub fn completion(id: &str, created: u64, model: &str, parser: Option<Parser>, answer: &Answer) -> Value {
    let finish = match answer.finish_reason {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::Cancelled => "stop",
    };
    let (read, written) = (answer.stats.prompt_tokens, answer.stats.generated_tokens);
    let (kind, choice) = match parser {
        None => {
            let choice =
                json!({ "index": 0, "text": answer.text, "logprobs": null, "finish_reason": finish });
            ("text_completion", choice)
        }
        Some(parser) => {
            let message = message(id, parser, &answer.text);
            let calls = message.get("tool_calls").is_some();
            let finish = if calls && finish == "stop" { "tool_calls" } else { finish };
            let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": finish });
            ("chat.completion", choice)
        }
    };
    json!({
        "id": id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": { "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written },
    })
}

/// The assistant's message, its reasoning and its calls apart. `id` names the answer.
fn message(id: &str, mut parser: Parser, text: &str) -> Value {
    let (mut reasoning, mut content) = (String::new(), String::new());
    let mut calls: Vec<(String, String)> = Vec::new();
    let mut take = |piece: Piece<'_>| match piece {
        Piece::Reasoning(text) => reasoning.push_str(text),
        Piece::Content(text) => content.push_str(text),
        Piece::Call { name } => calls.push((name.to_owned(), String::new())),
        Piece::Arguments(text) => {
            if let Some((_, arguments)) = calls.last_mut() {
                arguments.push_str(text);
            }
        }
    };
    parser.push(text, &mut take);
    parser.finish(&mut take);
    let mut message = json!({ "role": "assistant", "content": content });
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        if content.is_empty() {
            message["content"] = Value::Null;
        }
        let id = id.trim_start_matches("chatcmpl-");
        let call = |(i, (name, arguments)): (usize, (String, String))| {
            json!({
                "id": format!("call_{id}_{i}"),
                "type": "function",
                "function": { "name": name, "arguments": arguments },
            })
        };
        message["tool_calls"] = calls.into_iter().enumerate().map(call).collect();
    }
    message
}

#[cfg(test)]
mod tests {
    use forebay_engine::chat::dialect::Dialect;

    use super::*;

    #[test]
    fn calls_are_told_from_what_is_said() {
        let tools = [json!({ "type": "function", "function": { "name": "now" } })];
        let parser = || Dialect::of("<tool_call>").parser("", &tools);
        let text = "<think>Hm.</think>Well:\n<tool_call>{\"name\": \"now\", \"arguments\": {\"zone\": 1}}</tool_call>";
        let said = message("chatcmpl-7", parser(), text);
        let call = json!({
            "id": "call_7_0", "type": "function", "function": { "name": "now", "arguments": "{\"zone\": 1}" },
        });
        let expected = json!({
            "role": "assistant", "content": "Well:", "reasoning_content": "Hm.", "tool_calls": [call],
        });
        assert_eq!(said, expected);
        let said = message("chatcmpl-7", parser(), "<tool_call>{\"name\": \"now\"}</tool_call>");
        assert_eq!(said["content"], Value::Null);
        assert_eq!(message("", parser(), "Hello."), json!({ "role": "assistant", "content": "Hello." }));
    }
}
