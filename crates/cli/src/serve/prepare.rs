//! From what is asked to what is computed.

use std::sync::Arc;

use forebay_engine::chat::dialect::{Dialect, ReasoningLimit};
use forebay_engine::{Grammar, TokenId};
use serde_json::{Map, Value};

use super::app::{App, Loaded};
use super::error::ApiError;
use super::turn::{Answering, ChatRequest, ToolChoice, Turn};
use crate::openai;
use crate::prompting::Prompting;

impl App {
    /// Checks a request, renders and counts its prompt, and queues it. What is wrong with it is known when this ends.
    pub async fn turn(self: &Arc<App>, request: ChatRequest) -> Result<Turn, ApiError> {
        self.prepare(move |app, loaded| {
            let prepared = prepare_chat(loaded, &request)?;
            app.queue(loaded, vec![prepared], &request.answering)
        })
        .await
    }

    /// How many tokens the prompt of a request has.
    pub async fn count_tokens(self: &Arc<App>, request: ChatRequest) -> Result<usize, ApiError> {
        self.prepare(move |_, loaded| Ok(prepare_chat(loaded, &request)?.tokens.len())).await
    }

    /// [`turn`](Self::turn) for texts that are continued as they are, and the texts themselves if they are to be told. The
    /// answers to the first come first.
    pub async fn continuation(
        self: &Arc<App>,
        body: openai::Body,
        answering: Answering,
        echo: bool,
    ) -> Result<(Turn, Option<Vec<String>>), ApiError> {
        self.prepare(move |app, loaded| {
            let prompts = body.prompts(&loaded.engine)?;
            let decode = |tokens: &Vec<TokenId>| loaded.engine.tokenizer().decode(tokens, false);
            let texts = echo.then(|| prompts.iter().map(decode).collect());
            let grammar =
                answering.format.schema().map(|schema| Grammar::json_schema(&loaded.engine, &schema));
            let grammar = grammar.transpose().map_err(|error| refused("response_format", error))?;
            let prepared = prompts.into_iter().map(|tokens| Prepared {
                tokens,
                parser: None,
                grammar: grammar.clone(),
                parallel: true,
            });
            Ok((app.queue(loaded, prepared.collect(), &answering)?, texts))
        })
        .await
    }

    /// Runs what takes a while aside, so that others are listened to meanwhile.
    pub async fn prepare<T: Send + 'static>(
        self: &Arc<App>,
        work: impl FnOnce(&App, &Loaded) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let app = Arc::clone(self);
        let task = tokio::task::spawn_blocking(move || work(&app, &*app.loaded()?));
        task.await.unwrap_or_else(|_| Err(ApiError::internal("the request could not be prepared")))
    }
}

/// A prompt, and how its answer is read.
pub struct Prepared {
    pub tokens: Vec<TokenId>,
    /// The text of the prompt and the tools, where the answer has parts.
    pub parser: Option<(String, Vec<Value>)>,
    pub grammar: Option<Grammar>,
    /// Whether there may be several calls.
    pub parallel: bool,
}

impl Prepared {
    /// The control tokens that the parser of the answer has to see.
    pub fn shown(&self, dialect: &Dialect) -> Vec<TokenId> {
        self.parser.as_ref().map_or_else(Vec::new, |(_, tools)| dialect.shown(tools))
    }

    /// What ends reasoning after so many tokens.
    pub fn limit(&self, loaded: &Loaded, most: Option<usize>) -> Result<Option<ReasoningLimit>, ApiError> {
        let (Some(most), Some((prompt, tools))) = (most, &self.parser) else { return Ok(None) };
        Ok(Some(loaded.dialect.limit(most, prompt, tools, loaded.engine.tokenizer())?))
    }
}

fn prepare_chat(loaded: &Loaded, request: &ChatRequest) -> Result<Prepared, ApiError> {
    if request.messages.is_empty() {
        return Err(ApiError::invalid("messages", "there are no messages"));
    }
    openai::refuse_answered(&request.messages)?;
    loaded.check_template()?;
    check_tools(&request.tools)?;
    // The model is told of all tools whichever it may call: a prompt that begins differently shares nothing with the one
    // before.
    let prompting = loaded.prompting(&request.tools, &request.kwargs);
    let prompt = openai::chat_prompt(&loaded.engine, &prompting, &request.messages)?;
    let tools = match request.tool_choice {
        ToolChoice::None => Vec::new(),
        ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => request.tools.clone(),
    };
    let grammar = if let Some(required) = required_tools(&request.tool_choice, &tools)? {
        let source =
            loaded.dialect.call_grammar(&prompt.text, &required).map_err(|error| refused("tools", error))?;
        Some(Grammar::lark(&loaded.engine, &source).map_err(|error| refused("tools", error))?)
    } else if let Some(schema) = request.answering.format.schema() {
        let source = loaded.dialect.answer_grammar(&prompt.text, &schema, &tools);
        Some(Grammar::lark(&loaded.engine, &source).map_err(|error| refused("response_format", error))?)
    } else if tools.len() < request.tools.len() {
        let source = loaded.dialect.text_grammar(&prompt.text);
        source.map(|source| Grammar::lark(&loaded.engine, &source)).transpose()?
    } else {
        None
    };
    Ok(Prepared {
        tokens: prompt.tokens,
        parser: Some((prompt.text, tools)),
        grammar,
        parallel: request.parallel_tool_calls,
    })
}

fn check_tools(tools: &[Value]) -> Result<(), ApiError> {
    for (i, tool) in tools.iter().enumerate() {
        if tool.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "function") {
            let message = format!("only functions are supported, not tools of type {}", tool["type"]);
            return Err(ApiError::invalid(format!("tools[{i}].type"), message));
        }
        if tool_name(tool).is_none_or(str::is_empty) {
            return Err(ApiError::invalid(format!("tools[{i}].function.name"), "a tool has no name"));
        }
    }
    Ok(())
}

/// Those of the tools that it has to call one of, if it has to.
fn required_tools(choice: &ToolChoice, tools: &[Value]) -> Result<Option<Vec<Value>>, ApiError> {
    match choice {
        ToolChoice::Auto | ToolChoice::None => Ok(None),
        ToolChoice::Required if tools.is_empty() => {
            Err(ApiError::invalid("tool_choice", "a call is required, but there are no tools"))
        }
        ToolChoice::Required => Ok(Some(tools.to_vec())),
        ToolChoice::Named(wanted) => {
            let named = tools.iter().filter(|tool| tool_name(tool) == Some(wanted)).cloned();
            let named: Vec<_> = named.collect();
            if named.is_empty() {
                return Err(ApiError::invalid("tool_choice", format!("there is no tool {wanted:?}")));
            }
            Ok(Some(named))
        }
    }
}

fn tool_name(tool: &Value) -> Option<&str> {
    tool.get("function").and_then(|function| function.get("name")).and_then(Value::as_str)
}

fn refused(param: &str, error: forebay_engine::Error) -> ApiError {
    let error = ApiError::from(error);
    if error.status.is_client_error() { ApiError { param: Some(param.into()), ..error } } else { error }
}

impl Loaded {
    /// How a conversation with these tools and variables becomes a prompt.
    pub fn prompting(&self, tools: &[Value], kwargs: &Map<String, Value>) -> Prompting {
        Prompting {
            template: self.template.clone(),
            think: self
                .think
                .filter(|_| !kwargs.contains_key("enable_thinking") && !kwargs.contains_key("thinking")),
            tools: tools.to_vec(),
            kwargs: kwargs.clone(),
            ..Prompting::default()
        }
    }
}
