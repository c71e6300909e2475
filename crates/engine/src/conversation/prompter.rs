//! Converts requests to prompts that are ready to be computed.

use std::sync::Arc;

use super::messages::{normalise, with_textual_arguments};
use super::{Assembler, ChatRequest, ReplyOptions, ToolChoice, reasoning};
use crate::TokenId;
use crate::chat::dialect::Dialect;
use crate::chat::{ChatTemplate, Message, RenderOptions, Rendered};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::Request;
use crate::generate::grammar::Grammar;
use crate::generate::sampler::SamplingOverrides;
use crate::tokenizer::EncodeOptions;

/// Converts chat requests to questions, with a model's chat template and sampling parameters.
///
/// # Examples
/// ```
/// use forebay_engine::{ChatRequest, Error, Prompter};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let prompter = Prompter::new(&engine);
/// let question = prompter.chat(ChatRequest::user("Tell me a story.").max_tokens(8))?;
/// assert_eq!(question.request.max_tokens, Some(8));
///
/// // What is wrong with a request is known before anything is computed.
/// let refused = prompter.chat(ChatRequest::new(Vec::new()));
/// assert!(matches!(refused, Err(Error::Field { field, .. }) if field == "messages"));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
pub struct Prompter {
    engine: Engine,
    /// Replaces the model's own template.
    template: Option<Arc<ChatTemplate>>,
    /// The model's format of reasoning and tool calls.
    dialect: Dialect,
    think: Option<bool>,
    sampling: SamplingOverrides,
}

/// A rendered prompt.
///
/// # Examples
/// ```
/// use forebay_engine::{ChatRequest, Prompter};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let prompt = Prompter::new(&engine).prompt(&ChatRequest::user("Hello!"))?;
/// assert_eq!(prompt.text, "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n");
/// assert_eq!(engine.tokenizer().decode(&prompt.tokens, true), prompt.text);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The prompt as the template renders it.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
}

/// A request that is ready to be answered. All errors in it have been found.
///
/// # Examples
/// ```
/// use forebay_engine::{ChatRequest, Prompter};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let request = ChatRequest::user("Tell me a story.").max_tokens(8);
/// let question = Prompter::new(&engine).chat(request)?;
/// let reply = engine.session().reply(&question, &mut |_| ())?;
/// assert_eq!(reply.answer.tokens.len(), 8);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Question {
    /// The request for the engine.
    pub request: Request,
    /// At the beginning of an answer. Clones share the tools.
    assembler: Assembler,
}

impl Question {
    /// The question for another answer to the same request. If a seed is set, each answer gets its own. Number 0 is the
    /// question itself.
    pub fn nth(&self, number: usize) -> Question {
        let mut question = self.clone();
        let seed = &mut question.request.sampling.seed;
        *seed = seed.map(|seed| seed.wrapping_add(number as u64));
        question.assembler.number(number);
        question
    }

    /// A parser for one answer.
    pub(crate) fn assembler(&self) -> Assembler {
        self.assembler.clone()
    }
}

impl Prompter {
    /// Uses the model's own template, and the sampling parameters that its file recommends.
    pub fn new(engine: &Engine) -> Prompter {
        let prompter = Prompter {
            engine: engine.clone(),
            template: None,
            dialect: Dialect::of(""),
            think: None,
            sampling: SamplingOverrides::default(),
        };
        prompter.with_template(None)
    }

    /// Replaces the model's template, if one is given.
    pub fn with_template(mut self, template: Option<Arc<ChatTemplate>>) -> Prompter {
        self.template = template;
        // A template that does not compile is an error only for chat requests.
        let source = self.template().ok().flatten().map_or("", ChatTemplate::source);
        self.dialect = Dialect::of(source).with_tokens(self.engine.tokenizer());
        self
    }

    /// Sets whether the model reasons first, for requests that do not say.
    pub fn with_think(self, think: Option<bool>) -> Prompter {
        Prompter { think, ..self }
    }

    /// Sets how tokens are sampled, for requests that do not say.
    pub fn with_sampling(self, sampling: SamplingOverrides) -> Prompter {
        Prompter { sampling, ..self }
    }

    /// The model.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The template in use, if there is one.
    ///
    /// # Errors
    /// If the model's template does not compile.
    pub fn template(&self) -> Result<Option<&ChatTemplate>> {
        match &self.template {
            Some(template) => Ok(Some(template)),
            None => self.engine.template(),
        }
    }

    /// Whether the model reasons first, for requests that do not say. `None`: the template decides.
    pub fn think(&self) -> Option<bool> {
        self.think
    }

    /// Renders a conversation of any length, whoever spoke last.
    ///
    /// # Errors
    /// If there is no template, or it reports an error; if a message's content is not text.
    pub fn prompt(&self, request: &ChatRequest) -> Result<Prompt> {
        let rendered = self.render(request)?;
        self.encode_rendered(rendered)
    }

    /// Prepares a request for the next message of a conversation.
    ///
    /// # Errors
    /// If the request is invalid, does not fit the context, or asks for something that the model does not support. The
    /// error [names the field](Error::Field). [`Error::Budget`] if there is not enough memory.
    pub fn chat(&self, request: ChatRequest) -> Result<Question> {
        request.check()?;
        refuse_answered(&request.messages)?;
        let rendered = self.render(&request)?;
        let about_messages = |error| Error::about("messages", error);
        self.engine.check_length(&rendered.text).map_err(about_messages)?;
        let Prompt { text, tokens } = self.encode_rendered(rendered)?;
        self.check_room(&tokens).map_err(about_messages)?;
        // The prompt lists all tools, whichever may be called, so that it shares its beginning with the previous
        // prompt.
        let has_tools = !request.tools.is_empty();
        let tools = if request.tool_choice == ToolChoice::None { Vec::new() } else { request.tools };
        let ChatRequest { tool_choice, parallel_tool_calls: parallel, options, .. } = request;
        let lark = |field: &'static str, source: Result<String>| {
            let grammar = source.and_then(|source| Grammar::lark(&self.engine, &source));
            grammar.map_err(|error| Error::about(field, error))
        };
        let exact = options.format.grammar();
        let mut has_parts = true;
        let grammar = if let Some(required) = tool_choice.required(&tools)? {
            Some(lark("tools", self.dialect.call_grammar(&text, &required))?)
        } else if let Some(schema) = options.format.schema() {
            Some(lark("response_format", Ok(self.dialect.answer_grammar(&text, &schema, &tools)))?)
        } else if exact.is_some() {
            has_parts = false;
            exact.cloned()
        } else if has_tools && tools.is_empty() {
            let source = self.dialect.text_grammar(&text);
            source.map(|source| Grammar::lark(&self.engine, &source)).transpose()?
        } else {
            None
        };
        let limit = options.reasoning.filter(|_| has_parts);
        let limit = limit.map(|most| self.dialect.limit(most, &text, &tools, self.engine.tokenizer()));
        let shown = self.dialect.shown(&tools);
        let parser = has_parts.then(|| self.dialect.parser(&text, &tools));
        let assembler = Assembler::new(parser, shown.clone(), parallel, options.call_ids.clone());
        let request =
            Request { grammar, shown, reasoning: limit.transpose()?, ..self.request(tokens, options)? };
        Ok(Question { request, assembler })
    }

    /// Prepares a request to continue a text, without a chat template. The whole answer is content.
    ///
    /// # Errors
    /// As [`chat`](Self::chat).
    pub fn text(&self, tokens: Vec<TokenId>, options: ReplyOptions) -> Result<Question> {
        Ok(self.texts(vec![tokens], options)?.remove(0))
    }

    /// Like [`text`](Self::text), for several texts.
    ///
    /// # Errors
    /// As [`chat`](Self::chat).
    pub fn texts(&self, prompts: Vec<Vec<TokenId>>, options: ReplyOptions) -> Result<Vec<Question>> {
        let grammar = match options.format.schema() {
            Some(schema) => {
                let grammar = Grammar::json_schema(&self.engine, &schema);
                Some(grammar.map_err(|error| Error::about("response_format", error))?)
            }
            None => options.format.grammar().cloned(),
        };
        let question = |tokens: Vec<TokenId>| {
            if tokens.is_empty() {
                return Err(Error::field("prompt", "the prompt is empty"));
            }
            self.check_room(&tokens).map_err(|error| Error::about("prompt", error))?;
            let request = Request { grammar: grammar.clone(), ..self.request(tokens, options.clone())? };
            Ok(Question { request, assembler: Assembler::new(None, Vec::new(), true, None) })
        };
        prompts.into_iter().map(question).collect()
    }

    /// Encodes a text that is to be continued.
    ///
    /// # Errors
    /// If it cannot fit the context. [`Error::Budget`] if there is not enough memory.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<TokenId>> {
        let encode = || {
            self.engine.check_length(text)?;
            let _memory = self.engine.hold_for_encoding(text)?;
            self.engine.tokenizer().encode(text, options)
        };
        encode().map_err(|error| Error::about("prompt", error))
    }

    fn render(&self, request: &ChatRequest) -> Result<Rendered> {
        let mut options = RenderOptions {
            add_generation_prompt: true,
            tools: request.tools.clone(),
            kwargs: request.kwargs.clone(),
            ..RenderOptions::default()
        };
        let template = self.template()?.ok_or_else(|| {
            Error::about("messages", Error::Unsupported("the model has no chat template".into()))
        })?;
        reasoning::set(&mut options.kwargs, request.think.or(self.think), template.source());
        let knows_developer = template.source().contains("developer");
        let messages = normalise(&request.messages, knows_developer)?;
        // A template writes the BOS token itself if the model needs one.
        let render = |messages| template.write(&template.adapt(messages, &options), &options);
        render(messages.clone()).or_else(|error| {
            // Some templates print arguments unchanged, which needs text instead of objects.
            let textual = with_textual_arguments(&messages);
            let rendered = if textual == messages { None } else { render(textual).ok() };
            rendered.ok_or_else(|| Error::about("messages", error))
        })
    }

    fn encode_rendered(&self, rendered: Rendered) -> Result<Prompt> {
        let encode = || {
            let _memory = self.engine.hold_for_encoding(&rendered.text)?;
            rendered.encode(self.engine.tokenizer())
        };
        let tokens = encode().map_err(|error| Error::about("messages", error))?;
        Ok(Prompt { text: rendered.text, tokens })
    }

    /// Refuses a prompt that leaves no context for an answer.
    fn check_room(&self, tokens: &[TokenId]) -> Result<()> {
        let limit = self.engine.context();
        if tokens.len() >= limit {
            return Err(Error::Context { tokens: tokens.len(), limit });
        }
        Ok(())
    }

    /// Combines a prompt and options to a request.
    fn request(&self, prompt: Vec<TokenId>, options: ReplyOptions) -> Result<Request> {
        let file = self.engine.file();
        let sampling = self.sampling.clone().overruled_by(options.sampling);
        Ok(Request {
            prompt,
            client: options.client,
            max_tokens: options.max_tokens,
            sampling: sampling.resolve(&file.metadata, file.path())?,
            stop: options.stop,
            ignore_end: options.ignore_end,
            logprobs: options.logprobs,
            ..Request::default()
        })
    }
}

/// Refuses a conversation that ends with the assistant's message, because continuing a message is not supported.
fn refuse_answered(messages: &[Message]) -> Result<()> {
    match messages.last() {
        Some(last) if last.role == "assistant" => Err(Error::field(
            "messages",
            "the last message is the assistant's, and continuing it is not supported: end with a user's or a tool's",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn who_has_spoken_last_is_answered() {
        let says = |role: &str| Message::new(role, "x");
        assert!(refuse_answered(&[says("user"), says("assistant")]).is_err());
        assert!(refuse_answered(&[says("assistant"), says("tool")]).is_ok());
    }

    #[test]
    fn a_choice_of_tools_names_those_that_there_are() {
        let tools = [serde_json::json!({ "type": "function", "function": { "name": "now" } })];
        let required =
            |choice: ToolChoice, tools: &[Value]| choice.required(tools).map(|all| all.map(|all| all.len()));
        assert_eq!(required(ToolChoice::Auto, &tools).unwrap(), None);
        assert_eq!(required(ToolChoice::Required, &tools).unwrap(), Some(1));
        assert_eq!(required(ToolChoice::Named("now".into()), &tools).unwrap(), Some(1));
        for (choice, tools) in [(ToolChoice::Required, &[][..]), (ToolChoice::Named("then".into()), &tools)] {
            let error = required(choice, tools).unwrap_err();
            assert!(matches!(error, Error::Field { field, .. } if field == "tool_choice"));
        }
    }
}
