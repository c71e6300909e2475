//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_engine::Client;
use forebay_engine::generate::sampler::Scored;
use serde_json::{Map, Value, json};

use super::{Envelope, Total, about_schema, answering, finish_reason, logprobs};
use crate::openai::fields::Unchecked;
use crate::openai::{Body, Endpoint};
use crate::serve::app::{App, Loaded, now};
use crate::serve::body::Json;
use crate::serve::error::ApiError;
use crate::serve::sse::{self, Events, Gone};
use crate::serve::turn::{ChatRequest, ToolChoice, Turn, TurnEnd, TurnEvent};

/// Answers a chat.
pub async fn chat(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Json(body): Json<Unchecked<Body>>,
) -> Result<Response, ApiError> {
    let body = body.supported()?;
    let about_schema = about_schema(body.json_schema.is_some());
    let wants = Wants::of(&body);
    let scored = body.logprobs == Some(Value::Bool(true));
    let read = move |loaded: &Loaded| {
        Ok(ChatRequest {
            answering: answering(&body, Endpoint::Chat, &loaded.engine)?,
            kwargs: body.kwargs(),
            tool_choice: tool_choice(body.tool_choice.as_ref())?,
            parallel_tool_calls: body.parallel_tool_calls.unwrap_or(true),
            tools: body.tools.unwrap_or_default(),
            messages: body.messages,
        })
    };
    let turn = app.turn(client, read).await.map_err(about_schema)?;
    let object = if wants.stream { "chat.completion.chunk" } else { "chat.completion" };
    let envelope =
        Envelope { id: crate::serve::id("chatcmpl-"), object, created: now(), model: app.model.clone() };
    if wants.stream {
        Ok(sse::respond(move |events| Streamed { app, envelope, wants, scored, events }.write(turn)))
    } else {
        whole(&app, &envelope, turn, scored).await.map(|answer| Json(answer).into_response())
    }
}

/// How an answer is to come.
pub struct Wants {
    pub stream: bool,
    pub usage: bool,
    pub progress: bool,
}

impl Wants {
    pub fn of(body: &Body) -> Wants {
        Wants {
            stream: body.stream == Some(true),
            usage: body.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true)),
            progress: body.return_progress == Some(true),
        }
    }
}

/// Reads whether tools are called.
pub fn tool_choice(asked: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let wrong = || {
        let message =
            "it is \"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";
        ApiError::invalid("tool_choice", message)
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

/// An answer that comes at once, when it is complete.
async fn whole(app: &App, envelope: &Envelope, mut turn: Turn, scored: bool) -> Result<Value, ApiError> {
    let mut drafts: Vec<Draft> = (0..turn.count()).map(|_| Draft::default()).collect();
    let mut total = Total::default();
    while let Some((index, event)) = turn.next().await {
        let draft = &mut drafts[index];
        match event {
            TurnEvent::Progress { .. } => {}
            TurnEvent::Scored(scored) => draft.pending.push(scored),
            TurnEvent::Reasoning(text) => {
                draft.pending.clear();
                draft.reasoning.push_str(&text);
            }
            TurnEvent::Content(text) => {
                draft.scored.append(&mut draft.pending);
                draft.content.push_str(&text);
            }
            TurnEvent::Call { id, name } => {
                draft.pending.clear();
                draft.calls.push((id, name, String::new()));
            }
            TurnEvent::Arguments(text) => {
                draft.pending.clear();
                if let Some((.., arguments)) = draft.calls.last_mut() {
                    arguments.push_str(&text);
                }
            }
            TurnEvent::End(end) => {
                total.add(index, drafts.len(), &end);
                drafts[index].end = Some(end);
            }
            TurnEvent::Failed(error) => return Err(error),
        }
    }
    let loaded = app.loaded()?;
    let tokenizer = loaded.engine.tokenizer();
    let choices = drafts.iter().enumerate().map(|(index, draft)| {
        let likely = scored.then(|| logprobs::chat(tokenizer, &draft.scored));
        let finish = draft.end.as_ref().map(|end| finish_reason(end.finish));
        json!({ "index": index, "message": draft.message(), "logprobs": likely, "finish_reason": finish })
    });
    let mut answer = envelope.with(choices.collect());
    answer["usage"] = total.usage();
    total.extend(&mut answer);
    Ok(answer)
}

/// An answer that is being collected.
#[derive(Default)]
struct Draft {
    reasoning: String,
    content: String,
    /// Id, name and arguments.
    calls: Vec<(String, String, String)>,
    scored: Vec<Scored>,
    /// Of tokens whose text has not come.
    pending: Vec<Scored>,
    end: Option<TurnEnd>,
}

impl Draft {
    fn message(&self) -> Value {
        // A message that only calls tools has no content.
        let content = (!self.content.is_empty() || self.calls.is_empty()).then_some(&self.content);
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|(id, name, arguments)| {
                json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
            });
            message["tool_calls"] = calls.collect();
        }
        message
    }
}

/// An answer that comes as it is made.
struct Streamed {
    app: Arc<App>,
    envelope: Envelope,
    wants: Wants,
    scored: bool,
    events: Events,
}

/// What is known of one of the answers.
#[derive(Default)]
struct Progress {
    calls: usize,
    pending: Vec<Scored>,
}

impl Streamed {
    async fn write(self, mut turn: Turn) -> Result<(), Gone> {
        let mut choices: Vec<Progress> = (0..turn.count()).map(|_| Progress::default()).collect();
        // Before anything is computed: whoever waits knows that the request is being answered.
        for index in 0..choices.len() {
            self.delta(index, json!({ "role": "assistant", "content": null }), None).await?;
        }
        let mut total = Total::default();
        while let Some((index, event)) = self.events.next(&mut turn).await? {
            let choice = &mut choices[index];
            match event {
                TurnEvent::Progress { done, total } => {
                    if self.wants.progress {
                        self.progress(index, done, total).await?;
                    }
                }
                TurnEvent::Scored(scored) => choice.pending.push(scored),
                TurnEvent::Reasoning(text) => {
                    choice.pending.clear();
                    self.delta(index, json!({ "reasoning_content": text }), None).await?;
                }
                TurnEvent::Content(text) => {
                    let scored = std::mem::take(&mut choice.pending);
                    self.delta(index, json!({ "content": text }), Some(scored)).await?;
                }
                TurnEvent::Call { id, name } => {
                    choice.pending.clear();
                    choice.calls += 1;
                    let call = json!({
                        "index": choice.calls - 1, "id": id, "type": "function",
                        "function": { "name": name, "arguments": "" },
                    });
                    self.delta(index, json!({ "tool_calls": [call] }), None).await?;
                }
                TurnEvent::Arguments(text) => {
                    choice.pending.clear();
                    self.arguments(index, choice.calls, &text).await?;
                }
                TurnEvent::End(end) => {
                    total.add(index, choices.len(), &end);
                    let mut chunk = self.chunk(index, json!({}), None, Some(finish_reason(end.finish)));
                    let mut own = Total::default();
                    own.add(0, 1, &end);
                    own.extend(&mut chunk);
                    self.events.data(&chunk).await?;
                }
                TurnEvent::Failed(error) => {
                    self.events.data(&error.openai()).await?;
                    return self.events.done().await;
                }
            }
        }
        if self.wants.usage {
            let mut chunk = self.envelope.with(json!([]));
            chunk["usage"] = total.usage();
            total.extend(&mut chunk);
            self.events.data(&chunk).await?;
        }
        self.events.done().await
    }

    async fn arguments(&self, index: usize, calls: usize, text: &str) -> Result<(), Gone> {
        let call = json!({ "index": calls.saturating_sub(1), "function": { "arguments": text } });
        self.delta(index, json!({ "tool_calls": [call] }), None).await
    }

    async fn progress(&self, index: usize, done: usize, total: usize) -> Result<(), Gone> {
        let mut chunk = self.chunk(index, Value::Object(Map::new()), None, None);
        chunk["prompt_progress"] = json!({ "processed": done, "total": total });
        self.events.data(&chunk).await
    }

    async fn delta(&self, index: usize, delta: Value, scored: Option<Vec<Scored>>) -> Result<(), Gone> {
        self.events.data(&self.chunk(index, delta, scored, None)).await
    }

    fn chunk(&self, index: usize, delta: Value, scored: Option<Vec<Scored>>, finish: Option<&str>) -> Value {
        let likely = match (scored, self.app.loaded()) {
            (Some(scored), Ok(loaded)) if self.scored => logprobs::chat(loaded.engine.tokenizer(), &scored),
            _ => Value::Null,
        };
        let choice = json!({ "index": index, "delta": delta, "logprobs": likely, "finish_reason": finish });
        let mut chunk = self.envelope.with(json!([choice]));
        if self.wants.usage {
            // Where it comes at the end, it is there all along.
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
