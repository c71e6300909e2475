//! Requests and answers in the words of OpenAI's API.

pub mod fields;
mod messages;
pub mod unsupported;

use std::borrow::Cow;
use std::collections::BTreeMap;

use forebay_engine::chat::Message;
use forebay_engine::chat::dialect::{Parser, Piece};
use forebay_engine::generate::sampler::SamplingOverrides;
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Answer, Engine, Error, FinishReason, Request, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use self::fields::{Fields, Integer, Unchecked, Unsupported, integer, or_default};
pub use self::messages::{normalise, text_of, with_textual_arguments};
use crate::prompting::{Prompt, Prompting};

/// Texts that may end an answer.
const MOST_STOPS: usize = 16;

/// What cannot be answered, and which field is the reason.
#[derive(Debug)]
pub struct Refusal {
    pub message: String,
    pub param: Option<Cow<'static, str>>,
    /// The engine's error, where that is the reason: it says whether there is too little memory, or context.
    pub error: Option<Error>,
}

impl Refusal {
    pub fn new(param: &'static str, message: impl Into<String>) -> Refusal {
        Refusal { message: message.into(), param: Some(param.into()), error: None }
    }

    /// The engine refuses a field.
    pub fn engine(param: &'static str, error: Error) -> Refusal {
        Refusal { message: error.to_string(), param: Some(param.into()), error: Some(error) }
    }

    /// An error in OpenAI's shape.
    pub fn body(&self) -> Value {
        let Refusal { message, param, .. } = self;
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

/// The body of a request. Fields that are neither here nor [known not to be supported](unsupported) are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Body {
    #[serde(deserialize_with = "or_default")]
    pub messages: Vec<Message>,
    pub prompt: Option<PromptField>,
    /// Some clients write -1 where they mean no limit.
    #[serde(deserialize_with = "integer")]
    max_tokens: Option<i64>,
    #[serde(deserialize_with = "integer")]
    max_completion_tokens: Option<i64>,
    /// What llama.cpp calls `max_tokens`.
    #[serde(deserialize_with = "integer")]
    n_predict: Option<i64>,
    /// Whether the answer goes on where the model would end it.
    pub ignore_eos: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// Some clients write -1 for all tokens.
    #[serde(deserialize_with = "integer")]
    top_k: Option<i64>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    #[serde(alias = "repetition_penalty")]
    repeat_penalty: Option<f32>,
    /// Of how many of the last tokens penalties are made; -1 for all.
    #[serde(deserialize_with = "integer")]
    repeat_last_n: Option<i64>,
    logit_bias: Option<BTreeMap<String, f32>>,
    #[serde(deserialize_with = "integer")]
    seed: Option<i64>,
    stop: Option<Stop>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    reasoning_effort: Option<String>,
    /// Some clients write -1 where they mean no limit.
    #[serde(
        alias = "thinking_budget_tokens",
        alias = "reasoning_budget_tokens",
        deserialize_with = "integer"
    )]
    thinking_budget: Option<i64>,
    #[serde(deserialize_with = "integer")]
    pub n: Option<u64>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub return_progress: Option<bool>,
    /// Whether, for a chat; how many, for a continuation.
    pub logprobs: Option<Value>,
    #[serde(deserialize_with = "integer")]
    pub top_logprobs: Option<usize>,
    pub response_format: Option<Value>,
    /// Another way to ask for an answer of a schema.
    pub json_schema: Option<Value>,
    pub echo: Option<bool>,
    /// Whether the model's beginning of a text is put before a text that is continued.
    pub add_special_tokens: Option<bool>,
    // Known, and supported in one way alone:
    #[serde(deserialize_with = "integer")]
    best_of: Option<u64>,
    modalities: Option<Vec<String>>,
}

impl Fields for Body {
    const UNSUPPORTED: &'static [&'static [Unsupported]] = &[unsupported::CHAT, unsupported::ANY];
}

/// A text to be continued, or several, as text or as tokens.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<Integer<u32>>),
    Several(Vec<Vec<Integer<u32>>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// What comes with a stream.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
}

impl Body {
    /// Reads a body. The field that is the reason why it cannot be read is named.
    pub fn read(value: Value) -> Result<Body, Refusal> {
        read_fields::<Unchecked<Body>>(value)?.supported()
    }

    /// The request for an engine, and what tells the parts of the answer apart where there are any. Without a seed, `seed`
    /// is used. Only what a file of requests can have is taken.
    pub fn request(
        &self,
        engine: &Engine,
        endpoint: Endpoint,
        seed: u64,
    ) -> Result<(Request, Option<Parser>), Refusal> {
        self.refuse_unknown_ways(endpoint)?;
        self.refuse_all_but_one_text()?;
        let (mut shown, mut reasoning) = (Vec::new(), None);
        let (param, tokens, parser) = match endpoint {
            Endpoint::Chat => {
                let prompting = self.prompting();
                let Prompt { text, tokens } = self.chat_prompt(engine, &prompting)?;
                let dialect = prompting
                    .dialect(engine)
                    .map_err(|error| Refusal::new("messages", format!("{error:#}")))?;
                shown = dialect.shown(&prompting.tools);
                let limit = |most| dialect.limit(most, &text, &prompting.tools, engine.tokenizer());
                reasoning = self
                    .thinking_budget()
                    .map(limit)
                    .transpose()
                    .map_err(|error| Refusal::new("thinking_budget", error.to_string()))?;
                ("messages", tokens, Some(dialect.parser(&text, &prompting.tools)))
            }
            Endpoint::Completions => {
                let mut prompts = self.prompts(engine)?;
                if prompts.len() != 1 {
                    return Err(Refusal::new("prompt", "a line of a file has one prompt"));
                }
                ("prompt", prompts.remove(0), None)
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
        let file = engine.file();
        let mut overrides = self.sampling(engine)?;
        overrides.seed = overrides.seed.or(Some(seed));
        let sampling = overrides.resolve(&file.metadata, file.path()).map_err(|error| Refusal {
            message: error.to_string(),
            param: None,
            error: None,
        })?;
        let mut request = Request::new(engine, tokens).map_err(|error| Refusal {
            message: error.to_string(),
            param: None,
            error: None,
        })?;
        request.max_tokens = self.max_tokens()?;
        request.sampling = sampling;
        request.stop = self.stops()?;
        request.shown = shown;
        request.reasoning = reasoning;
        request.ignore_end = self.ignore_eos == Some(true);
        Ok((request, parser))
    }

    fn prompting(&self) -> Prompting {
        let tools = self.tools.clone().unwrap_or_default();
        Prompting { kwargs: self.kwargs(), tools, ..Prompting::default() }
    }

    fn chat_prompt(&self, engine: &Engine, prompting: &Prompting) -> Result<Prompt, Refusal> {
        if self.messages.is_empty() {
            return Err(Refusal::new("messages", "there are no messages"));
        }
        refuse_answered(&self.messages)?;
        chat_prompt(engine, prompting, &self.messages)
    }

    /// Variables for the template.
    pub fn kwargs(&self) -> Map<String, Value> {
        let mut kwargs = self.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(effort) = &self.reasoning_effort {
            kwargs.entry("reasoning_effort").or_insert_with(|| effort.as_str().into());
            // Templates that know no efforts often know how not to reason.
            if effort == "none" {
                kwargs.entry("enable_thinking").or_insert(false.into());
                kwargs.entry("thinking").or_insert(false.into());
            }
        }
        kwargs
    }

    /// The tokens of each text to be continued.
    pub fn prompts(&self, engine: &Engine) -> Result<Vec<Vec<TokenId>>, Refusal> {
        let encode = |text: &str| {
            let bos = if self.add_special_tokens == Some(false) { Bos::Never } else { Bos::AsFileSays };
            let options = EncodeOptions { special: true, bos };
            let refused = |error| Refusal::engine("prompt", error);
            engine.check_length(text).map_err(refused)?;
            let _memory = engine.hold_for_encoding(text).map_err(refused)?;
            engine.tokenizer().encode(text, options).map_err(refused)
        };
        let ids = |tokens: &[Integer<u32>]| tokens.iter().map(|token| TokenId(token.0)).collect();
        let prompts = match &self.prompt {
            None => return Err(Refusal::new("prompt", "there is no prompt")),
            Some(PromptField::Text(text)) => vec![encode(text)?],
            Some(PromptField::Texts(texts)) => {
                texts.iter().map(|text| encode(text)).collect::<Result<_, _>>()?
            }
            Some(PromptField::Tokens(tokens)) => vec![ids(tokens)],
            Some(PromptField::Several(several)) => several.iter().map(|tokens| ids(tokens)).collect(),
        };
        for token in prompts.iter().flatten() {
            if token.0 as usize >= engine.vocab_size() {
                return Err(Refusal::new("prompt", format!("{} is not a token of the model", token.0)));
            }
        }
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(Refusal::new("prompt", "there is nothing to continue"));
        }
        Ok(prompts)
    }

    /// The most tokens of an answer.
    pub fn max_tokens(&self) -> Result<Option<usize>, Refusal> {
        let (param, asked) = match (self.max_completion_tokens, self.max_tokens, self.n_predict) {
            (Some(asked), ..) => ("max_completion_tokens", asked),
            (None, Some(asked), _) => ("max_tokens", asked),
            (None, None, Some(asked)) => ("n_predict", asked),
            (None, None, None) => return Ok(None),
        };
        match asked {
            -1 => Ok(None),
            1.. => Ok(Some(usize::try_from(asked).unwrap_or(usize::MAX))),
            _ => Err(Refusal::new(param, format!("{param} is {asked}, but must be at least 1"))),
        }
    }

    /// The most tokens of reasoning.
    pub fn thinking_budget(&self) -> Option<usize> {
        self.thinking_budget.and_then(|most| usize::try_from(most).ok())
    }

    /// Texts that end an answer.
    pub fn stops(&self) -> Result<Vec<String>, Refusal> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Stop::One(text)) => vec![text.clone()],
            Some(Stop::Several(texts)) => texts.clone(),
        };
        if stops.len() > MOST_STOPS {
            let message = format!("{} texts were given, but there may be {MOST_STOPS}", stops.len());
            return Err(Refusal::new("stop", message));
        }
        if stops.iter().any(String::is_empty) {
            return Err(Refusal::new("stop", "an empty text would end every answer at once"));
        }
        Ok(stops)
    }

    /// How tokens are to be chosen, where the request says; each value is in its range.
    pub fn sampling(&self, engine: &Engine) -> Result<SamplingOverrides, Refusal> {
        let bias = self.logit_bias.iter().flatten().map(|(token, bias)| match token.parse() {
            Ok(id) if (id as usize) < engine.vocab_size() => Ok((TokenId(id), *bias)),
            _ => Err(Refusal::new("logit_bias", format!("{token} is not a token of the model"))),
        });
        let bias = bias.collect::<Result<Vec<_>, _>>()?;
        let overrides = SamplingOverrides {
            temperature: self.temperature,
            top_k: self.top_k.map(|k| usize::try_from(k).unwrap_or(0)),
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last_n: self.repeat_last_n.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
            logit_bias: (!bias.is_empty()).then_some(bias),
            seed: self.seed.map(|seed| seed as u64),
        };
        check_ranges(&overrides)?;
        Ok(overrides)
    }

    /// What no answer can have.
    pub fn refuse_unknown_ways(&self, endpoint: Endpoint) -> Result<(), Refusal> {
        let is_chat = endpoint == Endpoint::Chat;
        // Both are also said to the template.
        let variable =
            |name: &str| self.chat_template_kwargs.as_ref().and_then(|all| all.get(name)?.as_bool());
        let no_turn = [self.add_generation_prompt, variable("add_generation_prompt")].contains(&Some(false));
        let continues =
            [self.continue_final_message, variable("continue_final_message")].contains(&Some(true));
        let unsupported = [
            ("add_generation_prompt", no_turn, "an answer is always a message of its own"),
            ("continue_final_message", continues, "an answer is always a message of its own"),
            (
                "best_of",
                self.best_of.is_some_and(|n| n > self.n.unwrap_or(1)),
                "ask for several answers with n",
            ),
            (
                "modalities",
                self.modalities.as_ref().is_some_and(|all| all.iter().any(|one| one != "text")),
                "only text is written",
            ),
            ("echo", is_chat && self.echo == Some(true), "the answer to a chat is the next message alone"),
            (
                "add_special_tokens",
                is_chat && self.add_special_tokens == Some(true),
                "the template writes what a chat begins with",
            ),
            ("messages", !is_chat && !self.messages.is_empty(), "a text is continued: send prompt"),
            (
                "tools",
                !is_chat && self.tools.as_ref().is_some_and(|tools| !tools.is_empty()),
                "a text that is continued calls none",
            ),
        ];
        match unsupported.into_iter().find(|(_, given, _)| *given) {
            Some((param, _, reason)) => {
                Err(Refusal::new(param, format!("{param} is not supported: {reason}")))
            }
            None => Ok(()),
        }
    }

    /// What a line of a file cannot have.
    fn refuse_all_but_one_text(&self) -> Result<(), Refusal> {
        let text = |format: &Value| format.get("type").and_then(Value::as_str) == Some("text");
        if self.n.is_some_and(|n| n != 1) {
            return Err(Refusal::new("n", "only one answer can be asked for"));
        }
        if self.stream == Some(true) {
            return Err(Refusal::new("stream", "answers to a file are not streamed"));
        }
        if self.logprobs.as_ref().is_some_and(|value| !value.is_null() && *value != false) {
            return Err(Refusal::new("logprobs", "probabilities are not supported"));
        }
        let no_tools = self.tools.as_ref().is_none_or(Vec::is_empty);
        let heeded = |choice: &Value| choice.is_null() || choice == "auto" || (choice == "none" && no_tools);
        if self.tool_choice.as_ref().is_some_and(|choice| !heeded(choice)) {
            return Err(Refusal::new("tool_choice", "only auto is supported"));
        }
        if self.response_format.as_ref().is_some_and(|format| !text(format)) {
            return Err(Refusal::new("response_format", "only text is supported"));
        }
        if self.json_schema.as_ref().is_some_and(|schema| !schema.is_null()) {
            return Err(Refusal::new("json_schema", "only text is supported"));
        }
        Ok(())
    }
}

/// Reads an object of fields, of which a wrong one is named.
pub fn read_fields<T: for<'de> Deserialize<'de>>(value: Value) -> Result<T, Refusal> {
    let Value::Object(fields) = &value else {
        return Err(Refusal {
            message: "the body makes no sense: it is not an object".into(),
            param: None,
            error: None,
        });
    };
    T::deserialize(&value).map_err(|error| {
        // What is wrong alone is what is wrong.
        let wrong = fields.iter().find_map(|(name, value)| {
            let alone = Value::Object(Map::from_iter([(name.clone(), value.clone())]));
            Some((name, T::deserialize(alone).err()?))
        });
        match wrong {
            Some((name, error)) => Refusal {
                message: format!("{name} makes no sense: {error}"),
                param: Some(name.clone().into()),
                error: None,
            },
            None => {
                Refusal { message: format!("the body makes no sense: {error}"), param: None, error: None }
            }
        }
    })
}

/// Refuses a conversation that has its answer: what the assistant began to say cannot be continued.
pub fn refuse_answered(messages: &[Message]) -> Result<(), Refusal> {
    match messages.last() {
        Some(last) if last.role == "assistant" => Err(Refusal::new(
            "messages",
            "the last message is the assistant's, and continuing it is not supported: end with a user's or a tool's",
        )),
        _ => Ok(()),
    }
}

/// The prompt of a conversation as a client sends it.
pub fn chat_prompt(engine: &Engine, prompting: &Prompting, messages: &[Message]) -> Result<Prompt, Refusal> {
    let refused = |error: anyhow::Error| match error.downcast::<Error>() {
        Ok(error) => Refusal::engine("messages", error),
        Err(error) => Refusal::new("messages", format!("{error:#}")),
    };
    let knows_developer = prompting.template(engine).map_err(refused)?.source().contains("developer");
    let messages = normalise(messages, knows_developer)?;
    prompting.prompt(engine, &messages).or_else(|error| {
        // A few templates write arguments as they are, and cannot do that with objects.
        let textual = with_textual_arguments(&messages);
        if textual == messages {
            return Err(refused(error));
        }
        prompting.prompt(engine, &textual).map_err(|_| refused(error))
    })
}

/// Finds a value out of its range, by its name.
fn check_ranges(overrides: &SamplingOverrides) -> Result<(), Refusal> {
    // Each alone, so that the one that is wrong has a name.
    let none = SamplingOverrides::default;
    let each = [
        ("temperature", SamplingOverrides { temperature: overrides.temperature, ..none() }),
        ("top_p", SamplingOverrides { top_p: overrides.top_p, ..none() }),
        ("min_p", SamplingOverrides { min_p: overrides.min_p, ..none() }),
        ("repeat_penalty", SamplingOverrides { repeat_penalty: overrides.repeat_penalty, ..none() }),
        ("presence_penalty", SamplingOverrides { presence_penalty: overrides.presence_penalty, ..none() }),
        ("frequency_penalty", SamplingOverrides { frequency_penalty: overrides.frequency_penalty, ..none() }),
        ("logit_bias", SamplingOverrides { logit_bias: overrides.logit_bias.clone(), ..none() }),
    ];
    for (param, alone) in each {
        alone
            .resolve(&Default::default(), "".as_ref())
            .map_err(|error| Refusal::new(param, error.to_string()))?;
    }
    Ok(())
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
    fn an_answer_is_a_message_of_its_own() {
        let refused = |body: Value| {
            let refusal = Body::read(body).unwrap().refuse_unknown_ways(Endpoint::Chat).err();
            refusal.and_then(|refusal| refusal.param).map(|param| param.into_owned())
        };
        for (name, other) in [("add_generation_prompt", false), ("continue_final_message", true)] {
            assert_eq!(refused(json!({ name: other })).as_deref(), Some(name));
            assert_eq!(refused(json!({ "chat_template_kwargs": { name: other } })).as_deref(), Some(name));
            assert_eq!(refused(json!({ name: !other, "chat_template_kwargs": { name: !other } })), None);
            assert_eq!(refused(json!({ name: null })), None);
        }
        let says = |role: &str| Message::new(role, "x");
        assert!(refuse_answered(&[says("user"), says("assistant")]).is_err());
        assert!(refuse_answered(&[says("assistant"), says("tool")]).is_ok());
    }

    #[test]
    fn calls_are_told_from_what_is_said() {
        let tools = [json!({ "type": "function", "function": { "name": "now" } })];
        let parser = || Dialect::of("<tool_call>{\"name\", \"arguments\"}</tool_call>").parser("", &tools);
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
