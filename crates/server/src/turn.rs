//! One running request, of any API.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use forebay_engine::conversation::ReplyOptions;
use forebay_engine::driver::Ticket;
use forebay_engine::{Client, Error, Question, ReplyEvent, TokenId};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::app::{App, Loaded, leaving, share};
use crate::error::ApiError;
use crate::memory::Account;
use crate::meters::{Meters, OpenPlace};
use crate::options::Words;
use crate::prepare::until;

/// A client may retry after so many seconds if all places are taken.
const RETRY_SECONDS: u64 = 5;

impl App {
    /// Sets the client of a request, and applies the server's limits.
    pub(super) fn limit(&self, client: Client, options: &mut ReplyOptions) {
        options.client = client;
        options.max_tokens = least(options.max_tokens, self.limits.max_tokens);
        options.reasoning = least(options.reasoning, self.limits.reasoning);
    }

    /// Queues `each` answers to every question.
    ///
    /// # Errors
    /// If all places are taken, or there is no memory for the request.
    pub(super) fn queue(
        &self,
        loaded: &Loaded,
        questions: &[Question],
        each: usize,
    ) -> Result<Turn, ApiError> {
        let count = questions.len().saturating_mul(each);
        let most = share(self.limits.open());
        if count > most {
            let message = format!(
                "{count} answers are requested at once, but one client may have at most {most} \
                 (ServerOptions::parallel and ServerOptions::queue)"
            );
            return Err(ApiError::invalid("n", message));
        }
        let Some(first) = questions.first() else {
            return Err(ApiError::bad_request("the request asks for no answer"));
        };
        let places = self
            .meters
            .places(first.request.client.number, count, self.limits.open())
            .map_err(|open| ApiError::overloaded(open, RETRY_SECONDS))?;
        let account = Account::current();
        account.add(&loaded.memory, each as u64 * questions.iter().map(bytes).sum::<u64>())?;
        let (sender, receiver) = unbounded_channel();
        let mut turn = Turn {
            prompt_tokens: questions.iter().map(|question| question.request.prompt.len()).sum(),
            receiver,
            tickets: Vec::with_capacity(count),
            open: count,
            words: self.words,
            deadline: self.limits.timeout.map(|limit| account.started + limit),
            abandoned: Box::pin(self.abandoned()),
            _account: account,
            started: Instant::now(),
            cached: 0,
            written: 0,
            failed: false,
        };
        let numbered =
            questions.iter().flat_map(|question| (0..each).map(move |number| question.nth(number)));
        for (index, (question, place)) in numbered.zip(places).enumerate() {
            let (sender, meters) = (sender.clone(), Arc::clone(&self.meters));
            let mut hearer = Hearer { index, sender, meters, words: self.words, read: 0, place: Some(place) };
            turn.tickets.push(loaded.ask(question, move |event| hearer.hear(event))?);
        }
        Ok(turn)
    }
}

/// Bytes that one answer keeps of the request: its parameters, and its tokens twice, because the conversation has them as well.
fn bytes(question: &Question) -> u64 {
    let request = &question.request;
    let stops: usize = request.stop.iter().map(String::len).sum();
    let biases = size_of_val(request.sampling.logit_bias.as_slice());
    (2 * request.prompt.len() * size_of::<TokenId>() + biases + stops) as u64
}

/// The smaller of the requested number and the limit.
fn least(asked: Option<usize>, most: Option<usize>) -> Option<usize> {
    asked.into_iter().chain(most).min()
}

/// A running request. Dropping it cancels its unfinished answers.
pub struct Turn {
    /// Prompt tokens of all questions.
    pub prompt_tokens: usize,
    receiver: UnboundedReceiver<(usize, Result<ReplyEvent, ApiError>)>,
    /// One for each answer.
    tickets: Vec<Ticket>,
    /// Answers that have not ended.
    open: usize,
    words: Words,
    deadline: Option<tokio::time::Instant>,
    /// Completes when the server abandons its requests.
    abandoned: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The memory of the request.
    _account: Arc<Account>,
    started: Instant,
    /// Tokens of the first prompt that came from the prefix cache.
    cached: usize,
    /// Tokens of answers that have ended.
    written: usize,
    failed: bool,
}

impl Turn {
    /// The number of answers.
    pub fn count(&self) -> usize {
        self.tickets.len()
    }

    /// The next event, with the index of its answer; `None` when all answers have ended. An error is the last event. The future can be
    /// dropped without losing an event.
    pub async fn next(&mut self) -> Option<Result<(usize, ReplyEvent), ApiError>> {
        if self.open == 0 {
            return None;
        }
        let received = tokio::select! {
            biased;
            () = self.abandoned.as_mut() => Err(leaving()),
            () = until(self.deadline) => Err(ApiError::timeout().in_words(self.words)),
            heard = self.receiver.recv() => match heard {
                Some((index, event)) => event.map(|event| (index, event)),
                None => Err(ApiError::internal("the computation failed: see the server's log")),
            }
        };
        match &received {
            Ok((index, ReplyEvent::End(answer))) => {
                if *index == 0 {
                    self.cached = answer.stats.reused_tokens;
                }
                self.written += answer.stats.generated_tokens;
                self.open -= 1;
            }
            Ok(_) => {}
            Err(_) => {
                self.tickets.clear();
                self.open = 0;
                self.failed = true;
            }
        }
        Some(received)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let outcome = match (self.open, self.failed) {
            (_, true) => "failed",
            (0, false) => "answered",
            _ => "cancelled by its client",
        };
        let seconds = self.started.elapsed().as_secs_f64();
        let Turn { prompt_tokens, cached, written, .. } = self;
        let rate = if seconds > 0.0 { *written as f64 / seconds } else { 0.0 };
        tracing::info!(
            "{outcome} in {seconds:.1} s: prompt {prompt_tokens} tokens ({cached} cached), {written} written, {rate:.1} tok/s"
        );
    }
}

/// Forwards the events of an answer, and counts them.
struct Hearer {
    index: usize,
    sender: UnboundedSender<(usize, Result<ReplyEvent, ApiError>)>,
    meters: Arc<Meters>,
    words: Words,
    /// Prompt tokens computed so far.
    read: usize,
    /// `None` when the answer has ended.
    place: Option<OpenPlace>,
}

impl Hearer {
    fn hear(&mut self, event: Result<ReplyEvent, Error>) {
        let event = event.map_err(|error| ApiError::from(error).in_words(self.words));
        match &event {
            Ok(ReplyEvent::Progress { done, .. }) => {
                // A request that was displaced by others computes its prompt again.
                self.meters.read(done.saturating_sub(self.read));
                self.read = *done;
            }
            // The place is free before the client learns of the end.
            Ok(ReplyEvent::End(answer)) => {
                self.meters.answer(answer);
                self.place = None;
            }
            Err(error) => {
                if error.status.is_server_error() {
                    self.meters.failed();
                }
                self.place = None;
            }
            Ok(_) => {}
        }
        // If the receiver is gone, the answer is being cancelled.
        let _ = self.sender.send((self.index, event));
    }
}
