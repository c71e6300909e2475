//! One conversation with a model, which keeps what was said.

use crate::chat::Message;
use crate::conversation::{ChatRequest, Prompter, Reply, ReplyEvent};
use crate::engine::Engine;
use crate::error::Result;
use crate::session::Session;

/// A chat with one user: it renders the messages with the model's chat template, keeps them, and computes only what is new in
/// each turn. For many conversations at once there is the [`Driver`](crate::Driver).
///
/// # Examples
/// ```
/// use forebay_engine::{Chat, Engine, Options};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let engine = Engine::open(model, &Options::new())?;
/// let mut chat = Chat::new(&engine).system("You tell short stories.");
/// # chat.request.options.max_tokens = Some(8);
/// chat.say("Tell me a story about a dragon.", |text| print!("{text}"))?;
/// let reply = chat.say("And then?", |text| print!("{text}"))?;
/// println!("\n{} tokens", reply.answer.tokens.len());
///
/// assert_eq!(chat.request.messages.len(), 5, "the system prompt, two messages and two answers");
/// assert!(reply.answer.stats.reused_tokens > 0, "only what is new was computed");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct Chat {
    /// The messages so far, and how they are answered: sampling, the length of an answer, reasoning.
    pub request: ChatRequest,
    session: Session,
    prompter: Prompter,
}

impl Chat {
    /// An empty conversation. Answers are sampled as the model's file recommends, and end where the model ends them.
    pub fn new(engine: &Engine) -> Chat {
        let request = ChatRequest::new(Vec::new());
        Chat { request, session: engine.session(), prompter: Prompter::new(engine) }
    }

    /// Puts a system prompt before all other messages.
    pub fn system(mut self, text: impl Into<String>) -> Chat {
        self.request.messages.insert(0, Message::new("system", text));
        self
    }

    /// Sends a message and calls `on_text` with the answer as it is generated. Reasoning is not part of that text; it is in the
    /// reply. The message and its answer become part of the conversation.
    ///
    /// # Errors
    /// If the model has no chat template, the conversation does not fit the context, or the computation fails. Then the
    /// conversation is as it was before.
    pub fn say(&mut self, text: impl Into<String>, mut on_text: impl FnMut(&str)) -> Result<Reply> {
        let Chat { request, session, prompter } = self;
        request.messages.push(Message::new("user", text));
        let question = prompter.chat(request.clone());
        let reply = question.and_then(|question| {
            session.reply(&question, &mut |event| {
                if let ReplyEvent::Content { text, .. } = event {
                    on_text(&text);
                }
            })
        });
        match &reply {
            Ok(reply) => request.messages.push(reply.message()),
            Err(_) => drop(request.messages.pop()),
        }
        reply
    }

    /// The tokens that the conversation holds, and the [handle](Session::cancel) with which another thread stops an answer.
    pub fn session(&self) -> &Session {
        &self.session
    }
}
