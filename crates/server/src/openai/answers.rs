//! Answers to a body of OpenAI's API, for programs that own a driver and need no HTTP.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::task::Poll;
use std::time::Duration;

use forebay_engine::conversation::Draft;
use forebay_engine::driver::Ticket;
use forebay_engine::{Driver, Error, Reply, ReplyEvent, Result};
use serde_json::Value;

use super::answer::Envelope;
use super::chunks::{Chunks, Wants};
use super::{Body, Endpoint};

/// The answers to a body: its chunks if it asks for a stream, otherwise one object with all of them. They have the fields that
/// `forebay serve` sends.
///
/// It is an iterator, which waits. An error is the last item. Dropping it cancels what is not answered.
///
/// # Examples
/// ```
/// use forebay_engine::{Driver, DriverOptions, Engine, Options};
/// use forebay_server::openai::{Answers, Endpoint};
/// use serde_json::json;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let driver = Driver::start(&Engine::open(model, &Options::new())?, DriverOptions::new(4))?;
/// let body = json!({ "messages": [{ "role": "user", "content": "Tell me a story." }], "max_tokens": 8, "stream": true });
/// for chunk in Answers::ask(&driver, "tales", Endpoint::Chat, body)? {
///     print!("{}", chunk?["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
/// }
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub struct Answers {
    driver: Driver,
    events: Receiver<(usize, Result<ReplyEvent>)>,
    /// Answers that have not ended.
    open: usize,
    form: AnswersForm,
    /// What has not been taken yet.
    ready: VecDeque<Value>,
    is_stream: bool,
    _tickets: Vec<Ticket>,
}

enum AnswersForm {
    Whole { envelope: Envelope, drafts: Vec<Draft>, replies: Vec<Option<Reply>> },
    Stream(Box<Chunks>),
}

impl Answers {
    /// Asks a driver. `model` is the name of the model in the answers.
    ///
    /// # Errors
    /// If a field is wrong, which [`Error::Field`] names, or the driver has ended.
    pub fn ask(driver: &Driver, model: &str, endpoint: Endpoint, body: Value) -> Result<Answers> {
        let body = Body::read(body)?;
        let wants = Wants::of(&body);
        let (questions, form) = body.questions(endpoint, driver.prompter(), |_| ())?;
        let each = form.each;
        let all = questions.iter().flat_map(|question| (0..each).map(move |number| question.nth(number)));
        let (tell, events) = channel();
        let mut tickets = Vec::with_capacity(questions.len() * each);
        for (index, question) in all.enumerate() {
            let tell = tell.clone();
            let tell = move |event| {
                // The receiver is gone if the answers are being cancelled.
                let _ = tell.send((index, event));
            };
            tickets.push(driver.ask_telling(question, tell)?);
        }
        let (open, is_stream) = (tickets.len(), wants.stream);
        let envelope = Envelope::new(model, form, is_stream);
        let mut ready = VecDeque::new();
        let form = if is_stream {
            let chunks = Chunks::new(envelope, wants, driver.engine(), open);
            ready.extend(chunks.start());
            AnswersForm::Stream(Box::new(chunks))
        } else {
            let (drafts, replies) = (0..open).map(|_| (Draft::default(), None)).unzip();
            AnswersForm::Whole { envelope, drafts, replies }
        };
        Ok(Answers { driver: driver.clone(), events, open, form, ready, is_stream, _tickets: tickets })
    }

    /// Whether the body asks for a stream.
    pub fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// The next item. Waits for it no longer than `patience`, and then is pending.
    pub fn next_within(&mut self, patience: Duration) -> Poll<Option<Result<Value>>> {
        self.next_from(|events| events.recv_timeout(patience))
    }

    fn next_from(
        &mut self,
        hear: impl Fn(&Receiver<(usize, Result<ReplyEvent>)>) -> Heard,
    ) -> Poll<Option<Result<Value>>> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(item)));
            }
            if self.open == 0 {
                return Poll::Ready(None);
            }
            let error = match hear(&self.events) {
                Ok((index, Ok(event))) => {
                    self.take(index, event);
                    continue;
                }
                Ok((_, Err(error))) => error,
                Err(RecvTimeoutError::Timeout) => return Poll::Pending,
                Err(RecvTimeoutError::Disconnected) => {
                    Error::Backend("the compute thread has panicked, which is a bug".into())
                }
            };
            self.open = 0;
            self._tickets.clear();
            return Poll::Ready(Some(Err(error)));
        }
    }

    fn take(&mut self, index: usize, event: ReplyEvent) {
        let ends = matches!(event, ReplyEvent::End(_));
        self.open -= usize::from(ends);
        let is_last = self.open == 0;
        match &mut self.form {
            AnswersForm::Stream(chunks) => {
                self.ready.extend(chunks.take(index, event));
                if is_last {
                    self.ready.extend(chunks.end());
                }
            }
            AnswersForm::Whole { envelope, drafts, replies } => {
                if let Some(reply) = drafts[index].take(event) {
                    replies[index] = Some(reply);
                }
                if is_last {
                    let replies: Vec<Reply> = replies.drain(..).flatten().collect();
                    self.ready.push_back(envelope.measured(&replies, self.driver.engine().tokenizer()));
                }
            }
        }
    }
}

type Heard = std::result::Result<(usize, Result<ReplyEvent>), RecvTimeoutError>;

impl Iterator for Answers {
    type Item = Result<Value>;

    fn next(&mut self) -> Option<Result<Value>> {
        let wait = |events: &Receiver<_>| events.recv().map_err(|_| RecvTimeoutError::Disconnected);
        match self.next_from(wait) {
            Poll::Ready(item) => item,
            Poll::Pending => unreachable!("this waits without a limit"),
        }
    }
}
