//! Converts a body to questions for the model.

use forebay_engine::conversation::{Format, ReplyOptions, ToolChoice};
use forebay_engine::internals::generate::sampler::SamplingOverrides;
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{ChatRequest, Engine, Error, Prompter, Question, Result, TokenId};
use serde_json::{Map, Value};

use super::answer::Form;
use super::fields::Integer;
use super::volatile::drop_volatile_lines;
use super::{Body, Endpoint, PromptField, Stop};

/// Maximum answers to one request.
const MOST_ANSWERS: u64 = 128;

/// Maximum alternatives for each token in logprobs.
const MOST_LOGPROBS: usize = 20;

/// Maximum stop texts.
const MOST_STOPS: usize = 16;

impl Body {
    /// The questions of a body, and the form of their answers. `adjust` sets defaults and limits.
    ///
    /// # Errors
    /// If a field is wrong or not supported, which [`Error::Field`] names, or memory is missing.
    pub fn questions(
        self,
        endpoint: Endpoint,
        prompter: &Prompter,
        adjust: impl FnOnce(&mut ReplyOptions),
    ) -> Result<(Vec<Question>, Form)> {
        let names_schema = self.json_schema.is_some();
        let asked = self.ask(endpoint, prompter, adjust);
        // Errors about the schema name the field that contains it.
        asked.map_err(|error| match error {
            Error::Field { field, error } if names_schema && field == "response_format" => {
                Error::Field { field: "json_schema".into(), error }
            }
            error => error,
        })
    }

    fn ask(
        self,
        endpoint: Endpoint,
        prompter: &Prompter,
        adjust: impl FnOnce(&mut ReplyOptions),
    ) -> Result<(Vec<Question>, Form)> {
        let mut options = self.options(endpoint, prompter.engine())?;
        adjust(&mut options);
        let n = self.n.unwrap_or(1);
        if !(1..=MOST_ANSWERS).contains(&n) {
            return Err(Error::field("n", format!("n is {n}, but must be between 1 and {MOST_ANSWERS}")));
        }
        let mut form =
            Form { endpoint, each: n as usize, is_scored: options.logprobs.is_some(), echoed: None };
        let questions = match endpoint {
            Endpoint::Chat => {
                let mut request = ChatRequest::default();
                request.options = options;
                request.kwargs = self.kwargs();
                request.tool_choice = tool_choice(self.tool_choice.as_ref())?;
                request.parallel_tool_calls = self.parallel_tool_calls.unwrap_or(true);
                request.tools = self.tools.unwrap_or_default();
                request.messages = self.messages;
                drop_volatile_lines(&mut request.messages)?;
                vec![prompter.chat(request)?]
            }
            Endpoint::Completions => {
                let echoes = self.echo == Some(true);
                if echoes && form.is_scored {
                    let message = "logprobs of the prompt are not supported: leave out echo or logprobs";
                    return Err(Error::field("echo", message));
                }
                let prompts = self.prompts(prompter)?;
                let decode = |tokens: &Vec<TokenId>| prompter.engine().tokenizer().decode(tokens, false);
                form.echoed = echoes.then(|| prompts.iter().map(decode).collect());
                prompter.texts(prompts, options)?
            }
        };
        Ok((questions, form))
    }

    /// The options of the answers.
    pub(crate) fn options(&self, endpoint: Endpoint, engine: &Engine) -> Result<ReplyOptions> {
        self.refuse_unknown_ways(endpoint)?;
        let mut options = ReplyOptions::default();
        options.max_tokens = self.max_tokens()?;
        options.reasoning = self.thinking_budget();
        options.sampling = self.sampling(engine)?;
        options.stop = self.stops()?;
        options.ignore_end = self.ignore_eos == Some(true);
        options.format = self.format()?;
        options.logprobs = self.logprobs(endpoint)?;
        Ok(options)
    }

    /// The format of the answer. Two fields can set it, but only one at a time.
    fn format(&self) -> Result<Format> {
        let wrong = |param: &str, message: &str| Err(Error::field(param, message));
        let present = |field: &Option<Value>| field.clone().filter(|value| !value.is_null());
        let schema = present(&self.json_schema);
        let Some(asked) = present(&self.response_format) else {
            return Ok(schema.map_or(Format::Text, Format::JsonSchema));
        };
        if schema.is_some() {
            return wrong("json_schema", "response_format is also given: leave out one of them");
        }
        match asked.get("type").and_then(Value::as_str) {
            Some("text") => Ok(Format::Text),
            Some("json_object") => Ok(present_schema(&asked).map_or(Format::JsonObject, Format::JsonSchema)),
            Some("json_schema") => match asked.get("json_schema").and_then(present_schema) {
                Some(schema) => Ok(Format::JsonSchema(schema)),
                // A name without a schema allows any object.
                None if asked.get("json_schema").is_some_and(Value::is_object) => Ok(Format::JsonObject),
                None => wrong("response_format.json_schema", "the field schema is missing"),
            },
            _ => wrong("response_format.type", "the type must be text, json_object or json_schema"),
        }
    }

    /// In chats, `logprobs` is a boolean and `top_logprobs` the number; in completions, `logprobs` is the number.
    fn logprobs(&self, endpoint: Endpoint) -> Result<Option<usize>> {
        let asked = match (endpoint, &self.logprobs) {
            (_, None | Some(Value::Null | Value::Bool(false))) => None,
            (Endpoint::Chat, Some(Value::Bool(true))) => Some(self.top_logprobs.unwrap_or(0)),
            (Endpoint::Completions, Some(Value::Bool(true))) => Some(0),
            (Endpoint::Completions, Some(Value::Number(n))) if n.as_f64().is_some_and(is_count) => {
                n.as_f64().map(|n| n as usize)
            }
            _ => {
                let message = match endpoint {
                    Endpoint::Chat => "logprobs must be true or false; top_logprobs is the number",
                    Endpoint::Completions => "logprobs must be a number of tokens",
                };
                return Err(Error::field("logprobs", message));
            }
        };
        match (asked, self.top_logprobs) {
            (None, Some(n)) if n > 0 && endpoint == Endpoint::Chat => {
                Err(Error::field("top_logprobs", "top_logprobs requires logprobs to be true"))
            }
            (Some(n), _) if n > MOST_LOGPROBS => {
                let param = if endpoint == Endpoint::Chat { "top_logprobs" } else { "logprobs" };
                Err(Error::field(param, format!("{n} are requested, but {MOST_LOGPROBS} is the limit")))
            }
            (asked, _) => Ok(asked),
        }
    }

    /// Variables for the chat template.
    pub(crate) fn kwargs(&self) -> Map<String, Value> {
        let mut kwargs = self.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(effort) = &self.reasoning_effort {
            kwargs.entry("reasoning_effort").or_insert_with(|| effort.as_str().into());
            // Templates without efforts often have a variable that disables reasoning.
            if effort == "none" {
                kwargs.entry("enable_thinking").or_insert(false.into());
                kwargs.entry("thinking").or_insert(false.into());
            }
        }
        kwargs
    }

    /// The tokens of each prompt.
    fn prompts(&self, prompter: &Prompter) -> Result<Vec<Vec<TokenId>>> {
        let encode = |text: &str| {
            let bos = if self.add_special_tokens == Some(false) { Bos::Never } else { Bos::AsFileSays };
            prompter.encode(text, EncodeOptions { special: true, bos })
        };
        let ids = |tokens: &[Integer<u32>]| tokens.iter().map(|token| TokenId(token.0)).collect();
        let prompts: Vec<Vec<TokenId>> = match &self.prompt {
            None => return Err(Error::field("prompt", "the field prompt is missing")),
            Some(PromptField::Text(text)) => vec![encode(text)?],
            Some(PromptField::Texts(texts)) => {
                texts.iter().map(|text| encode(text)).collect::<Result<_, _>>()?
            }
            Some(PromptField::Tokens(tokens)) => vec![ids(tokens)],
            Some(PromptField::Several(several)) => several.iter().map(|tokens| ids(tokens)).collect(),
        };
        for token in prompts.iter().flatten() {
            if token.0 as usize >= prompter.engine().vocab_size() {
                return Err(Error::field("prompt", format!("{} is not a token of this model", token.0)));
            }
        }
        if prompts.is_empty() {
            return Err(Error::field("prompt", "the prompt is empty"));
        }
        Ok(prompts)
    }

    /// Maximum tokens of an answer.
    fn max_tokens(&self) -> Result<Option<usize>> {
        let (param, asked) = match (self.max_completion_tokens, self.max_tokens, self.n_predict) {
            (Some(asked), ..) => ("max_completion_tokens", asked),
            (None, Some(asked), _) => ("max_tokens", asked),
            (None, None, Some(asked)) => ("n_predict", asked),
            (None, None, None) => return Ok(None),
        };
        match asked {
            -1 => Ok(None),
            1.. => Ok(Some(usize::try_from(asked).unwrap_or(usize::MAX))),
            _ => Err(Error::field(param, format!("{param} is {asked}, but must be at least 1"))),
        }
    }

    /// Maximum tokens of reasoning.
    fn thinking_budget(&self) -> Option<usize> {
        self.thinking_budget.and_then(|most| usize::try_from(most).ok())
    }

    /// The stop texts.
    fn stops(&self) -> Result<Vec<String>> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Stop::One(text)) => vec![text.clone()],
            Some(Stop::Several(texts)) => texts.clone(),
        };
        if stops.len() > MOST_STOPS {
            let message = format!("{} texts are given, but at most {MOST_STOPS} are supported", stops.len());
            return Err(Error::field("stop", message));
        }
        if stops.iter().any(String::is_empty) {
            return Err(Error::field("stop", "a text is empty, which would end every answer at once"));
        }
        Ok(stops)
    }

    /// The sampling options of the request, checked for their ranges.
    fn sampling(&self, engine: &Engine) -> Result<SamplingOverrides> {
        let bias = self.logit_bias.iter().flatten().map(|(token, bias)| match token.parse() {
            Ok(id) if (id as usize) < engine.vocab_size() => Ok((TokenId(id), *bias)),
            _ => Err(Error::field("logit_bias", format!("{token} is not a token of this model"))),
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
        overrides.validate()?;
        Ok(overrides)
    }

    /// Refuses what no answer can have.
    fn refuse_unknown_ways(&self, endpoint: Endpoint) -> Result<()> {
        let is_chat = endpoint == Endpoint::Chat;
        // Both can also be variables of the template.
        let variable =
            |name: &str| self.chat_template_kwargs.as_ref().and_then(|all| all.get(name)?.as_bool());
        let no_turn = [self.add_generation_prompt, variable("add_generation_prompt")].contains(&Some(false));
        let continues =
            [self.continue_final_message, variable("continue_final_message")].contains(&Some(true));
        let unsupported = [
            ("add_generation_prompt", no_turn, "an answer is always a new message"),
            ("continue_final_message", continues, "an answer is always a new message"),
            (
                "best_of",
                self.best_of.is_some_and(|n| n > self.n.unwrap_or(1)),
                "request several answers with n",
            ),
            (
                "modalities",
                self.modalities.as_ref().is_some_and(|all| all.iter().any(|one| one != "text")),
                "the model generates only text",
            ),
            ("echo", is_chat && self.echo == Some(true), "a chat answer is only the next message"),
            (
                "add_special_tokens",
                is_chat && self.add_special_tokens == Some(true),
                "the chat template adds the tokens at the start",
            ),
            ("messages", !is_chat && !self.messages.is_empty(), "this address continues a text: send prompt"),
            (
                "tools",
                !is_chat && self.tools.as_ref().is_some_and(|tools| !tools.is_empty()),
                "this address supports no tool calls: use /v1/chat/completions",
            ),
        ];
        match unsupported.into_iter().find(|(_, given, _)| *given) {
            Some((param, _, reason)) => {
                Err(Error::field(param, format!("{param} is not supported: {reason}")))
            }
            None => Ok(()),
        }
    }
}

/// Parses the choice of tools.
pub fn tool_choice(asked: Option<&Value>) -> Result<ToolChoice> {
    let wrong = || {
        let message = "it must be \"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";
        Error::field("tool_choice", message)
    };
    match asked {
        None | Some(Value::Null) => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Required),
            _ => Err(wrong()),
        },
        Some(Value::Object(choice)) => {
            let name = choice.get("function").unwrap_or(asked.expect("it is an object")).get("name");
            let is_function = choice.get("type").is_none_or(|kind| kind == "function");
            match name.and_then(Value::as_str).filter(|_| is_function) {
                Some(name) => Ok(ToolChoice::Named(name.to_owned())),
                None => Err(wrong()),
            }
        }
        Some(_) => Err(wrong()),
    }
}

fn present_schema(described: &Value) -> Option<Value> {
    described.get("schema").filter(|schema| !schema.is_null()).cloned()
}

/// Whether a number is a positive integer, with or without a decimal point.
fn is_count(n: f64) -> bool {
    n >= 0.0 && n.fract() == 0.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_is_a_message_of_its_own() {
        let refused = |body: Value| {
            let error = Body::read(body).unwrap().refuse_unknown_ways(Endpoint::Chat).err();
            error.map(|error| if let Error::Field { field, .. } = error { field } else { panic!("{error}") })
        };
        for (name, other) in [("add_generation_prompt", false), ("continue_final_message", true)] {
            assert_eq!(refused(json!({ name: other })).as_deref(), Some(name));
            assert_eq!(refused(json!({ "chat_template_kwargs": { name: other } })).as_deref(), Some(name));
            assert_eq!(refused(json!({ name: !other, "chat_template_kwargs": { name: !other } })), None);
            assert_eq!(refused(json!({ name: null })), None);
        }
    }

    #[test]
    fn tool_choices_are_words_or_a_name() {
        let read = |value: Value| tool_choice(Some(&value)).ok();
        assert_eq!(tool_choice(None).unwrap(), ToolChoice::Auto);
        assert_eq!(read(json!("none")), Some(ToolChoice::None));
        assert_eq!(read(json!("required")), Some(ToolChoice::Required));
        let named = Some(ToolChoice::Named("f".into()));
        assert_eq!(read(json!({ "type": "function", "function": { "name": "f" } })), named);
        assert_eq!(read(json!({ "type": "function", "name": "f" })), named);
        for wrong in [json!("maybe"), json!(1), json!({ "type": "custom", "name": "f" }), json!({})] {
            assert_eq!(read(wrong.clone()), None, "{wrong}");
        }
    }
}
