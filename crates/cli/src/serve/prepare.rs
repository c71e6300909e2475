//! From what is asked to what is computed.

use std::sync::Arc;

use forebay_engine::chat::dialect::{Parser, ReasoningLimit};
use forebay_engine::{Client, Grammar, TokenId};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::app::{App, Loaded, leaving};
use super::error::ApiError;
use super::memory::{Account, busy};
use super::openai::answering;
use super::turn::{ChatRequest, Format, ToolChoice, Turn};
use crate::openai;
use crate::prompting::Prompting;

impl App {
    /// Reads a request, checks it, renders and counts its prompt, and queues it. What is wrong with it is known when this
    /// ends.
    pub async fn turn(
        self: &Arc<App>,
        client: Client,
        read: impl FnOnce(&Loaded) -> Result<ChatRequest, ApiError> + Send + 'static,
    ) -> Result<Turn, ApiError> {
        self.prepare(move |app, loaded| {
            let mut request = read(loaded)?;
            let answering = std::mem::take(&mut request.answering);
            let prepared = prepare_chat(loaded, request, &answering.format)?;
            app.queue(loaded, client, vec![prepared], &answering)
        })
        .await
    }

    /// How many tokens the prompt of a request has.
    pub async fn count_tokens(
        self: &Arc<App>,
        read: impl FnOnce(&Loaded) -> Result<ChatRequest, ApiError> + Send + 'static,
    ) -> Result<usize, ApiError> {
        self.prepare(move |_, loaded| {
            let request = read(loaded)?;
            check_chat(loaded, &request)?;
            let prompting = loaded.prompting(request.tools, request.kwargs);
            let prompting = Prompting { any_length: true, ..prompting };
            Ok(openai::chat_prompt(&loaded.engine, &prompting, &request.messages)?.tokens.len())
        })
        .await
    }

    /// [`turn`](Self::turn) for texts that are continued as they are; `echo` has the texts themselves told.
    pub async fn continuation(
        self: &Arc<App>,
        client: Client,
        body: openai::Body,
        echo: bool,
    ) -> Result<Continuation, ApiError> {
        self.prepare(move |app, loaded| {
            let answering = answering(&body, openai::Endpoint::Completions, &loaded.engine)?;
            let scored = answering.logprobs.is_some();
            if echo && scored {
                let message = "how likely the prompt's tokens are is not told: leave out logprobs";
                return Err(ApiError::invalid("echo", message));
            }
            let prompts = body.prompts(&loaded.engine)?;
            let decode = |tokens: &Vec<TokenId>| loaded.engine.tokenizer().decode(tokens, false);
            let texts = echo.then(|| prompts.iter().map(decode).collect());
            let grammar =
                answering.format.schema().map(|schema| Grammar::json_schema(&loaded.engine, &schema));
            let grammar = grammar.transpose().map_err(|error| refused("response_format", error))?;
            let prepared = prompts.into_iter().map(|tokens| Prepared {
                tokens,
                chat: None,
                grammar: grammar.clone(),
                parallel: true,
            });
            let turn = app.queue(loaded, client, prepared.collect(), &answering)?;
            Ok(Continuation { turn, prompts: texts, each: answering.more + 1, scored })
        })
        .await
    }

    /// Runs what takes a while aside, so that others are listened to meanwhile: until its request's time is over, or the server
    /// leaves.
    pub async fn prepare<T: Send + 'static>(
        self: &Arc<App>,
        work: impl FnOnce(&App, &Loaded) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let account = Account::current();
        let waiting = account.waiting();
        let end = self.limits.timeout.map(|limit| account.started + limit);
        let (app, abandoned) = (Arc::clone(self), self.abandoned());
        let work = async move {
            let loaded = app.loaded()?;
            // Templates get copies of what was sent.
            let copies = account.lend_when_free(&loaded.memory, account.preparing()).await?;
            let result = aside({
                let app = Arc::clone(&app);
                move || {
                    let _copies = copies;
                    account.within(|| work(&app, &loaded))
                }
            });
            // Memory that others use now may suffice later.
            let now =
                |error: ApiError| if error.is_budget() && app.meters.open() > 0 { busy() } else { error };
            result.await.map_err(now)
        };
        let result = tokio::select! {
            result = work => result,
            () = abandoned => return Err(leaving()),
            () = until(end) => return Err(ApiError::timeout()),
        };
        waiting.done();
        result
    }
}

/// Texts that are being continued.
pub struct Continuation {
    /// The answers to the first text come first.
    pub turn: Turn,
    /// The texts, if they are to be told.
    pub prompts: Option<Vec<String>>,
    /// Answers to each text.
    pub each: usize,
    /// Whether it is told how likely tokens were.
    pub scored: bool,
}

/// Threads for what takes a while.
pub const ASIDE_THREADS: usize = 4;

/// Those that are free.
static FREE_THREADS: Semaphore = Semaphore::const_new(ASIDE_THREADS);

/// Runs what takes a while on another thread. Who leaves before its turn comes takes its work along.
pub async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let thread = FREE_THREADS.acquire().await;
    let task = tokio::task::spawn_blocking(move || {
        let _thread = thread;
        work()
    });
    task.await.unwrap_or_else(|_| Err(ApiError::internal("the request could not be prepared")))
}

/// Comes to an end at this time, if there is one.
pub async fn until(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// A prompt, and how its answer is read.
pub struct Prepared {
    pub tokens: Vec<TokenId>,
    /// How the answer is read, where it has parts.
    pub chat: Option<PreparedChat>,
    pub grammar: Option<Grammar>,
    /// Whether there may be several calls.
    pub parallel: bool,
}

/// How the answer to a chat is read.
pub struct PreparedChat {
    /// At the answer's beginning. Clones share the tools.
    pub parser: Parser,
    /// The control tokens that it has to see.
    pub shown: Vec<TokenId>,
    prompt: String,
    tools: Vec<Value>,
}

impl PreparedChat {
    /// What ends reasoning after so many tokens.
    pub fn limit(&self, loaded: &Loaded, most: usize) -> Result<ReasoningLimit, ApiError> {
        Ok(loaded.dialect.limit(most, &self.prompt, &self.tools, loaded.engine.tokenizer())?)
    }
}

fn prepare_chat(loaded: &Loaded, request: ChatRequest, format: &Format) -> Result<Prepared, ApiError> {
    check_chat(loaded, &request)?;
    openai::refuse_answered(&request.messages)?;
    // The model is told of all tools whichever it may call: a prompt that begins differently shares nothing with the one
    // before.
    let has_tools = !request.tools.is_empty();
    let prompting = loaded.prompting(request.tools, request.kwargs);
    let prompt = openai::chat_prompt(&loaded.engine, &prompting, &request.messages)?;
    let tools = match request.tool_choice {
        ToolChoice::None => Vec::new(),
        ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => prompting.tools,
    };
    let grammar = if let Some(required) = required_tools(&request.tool_choice, &tools)? {
        let source =
            loaded.dialect.call_grammar(&prompt.text, &required).map_err(|error| refused("tools", error))?;
        Some(Grammar::lark(&loaded.engine, &source).map_err(|error| refused("tools", error))?)
    } else if let Some(schema) = format.schema() {
        let source = loaded.dialect.answer_grammar(&prompt.text, &schema, &tools);
        Some(Grammar::lark(&loaded.engine, &source).map_err(|error| refused("response_format", error))?)
    } else if has_tools && tools.is_empty() {
        let source = loaded.dialect.text_grammar(&prompt.text);
        source.map(|source| Grammar::lark(&loaded.engine, &source)).transpose()?
    } else {
        None
    };
    let parser = loaded.dialect.parser(&prompt.text, &tools);
    let shown = loaded.dialect.shown(&tools);
    Ok(Prepared {
        tokens: prompt.tokens,
        chat: Some(PreparedChat { parser, shown, prompt: prompt.text, tools }),
        grammar,
        parallel: request.parallel_tool_calls,
    })
}

/// What is wrong with a conversation before it is rendered.
fn check_chat(loaded: &Loaded, request: &ChatRequest) -> Result<(), ApiError> {
    if request.messages.is_empty() {
        return Err(ApiError::invalid("messages", "there are no messages"));
    }
    loaded.check_template()?;
    check_tools(&request.tools)
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
    pub fn prompting(&self, tools: Vec<Value>, kwargs: Map<String, Value>) -> Prompting {
        Prompting {
            template: self.template.clone(),
            think: self
                .think
                .filter(|_| !kwargs.contains_key("enable_thinking") && !kwargs.contains_key("thinking")),
            tools,
            kwargs,
            ..Prompting::default()
        }
    }
}
