//! One request that is being answered, whatever API it came by.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use forebay_engine::conversation::ReplyOptions;
use forebay_engine::driver::Ticket;
use forebay_engine::{Client, Error, Question, ReplyEvent, TokenId};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::app::{App, Loaded, leaving, share};
use super::error::ApiError;
use super::memory::Account;
use super::meters::{Meters, OpenPlace};
use super::prepare::until;

/// When there is no room for a request, it may come again after so long.
const RETRY_SECONDS: u64 = 5;

impl App {
    /// Says whose request it is, and what the server allows at most.
    pub(super) fn limit(&self, client: Client, options: &mut ReplyOptions) {
        options.client = client;
        options.max_tokens = least(options.max_tokens, self.limits.max_tokens);
        options.reasoning = least(options.reasoning, self.limits.reasoning);
    }

    /// Queues `each` answers to every question.
    ///
    /// # Errors
    /// If there is no room for them.
    pub(super) fn queue(
        &self,
        loaded: &Loaded,
        questions: &[Question],
        each: usize,
    ) -> Result<Turn, ApiError> {
        let count = questions.len().saturating_mul(each);
        let most = share(self.limits.open());
        if count > most {
            let message = format!("{count} answers were asked for at once, but this server takes {most}");
            return Err(ApiError::invalid("n", message));
        }
        let Some(first) = questions.first() else {
            return Err(ApiError::bad_request("there is nothing to answer"));
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
            let mut hearer = Hearer { index, sender, meters, read: 0, place: Some(place) };
            turn.tickets.push(loaded.ask(question, move |event| hearer.hear(event))?);
        }
        Ok(turn)
    }
}

/// Bytes that one answer to a question holds of the request: what says how it is made, and tokens twice, since a conversation has
/// them, too.
fn bytes(question: &Question) -> u64 {
    let request = &question.request;
    let stops: usize = request.stop.iter().map(String::len).sum();
    let biases = size_of_val(request.sampling.logit_bias.as_slice());
    (2 * request.prompt.len() * size_of::<TokenId>() + biases + stops) as u64
}

/// What is asked for, up to what there may be.
fn least(asked: Option<usize>, most: Option<usize>) -> Option<usize> {
    asked.into_iter().chain(most).min()
}

/// A request that is being answered. Dropping it cancels what is left of it.
pub struct Turn {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    receiver: UnboundedReceiver<(usize, Result<ReplyEvent, ApiError>)>,
    /// One for each answer.
    tickets: Vec<Ticket>,
    /// Answers that have not ended.
    open: usize,
    deadline: Option<tokio::time::Instant>,
    /// Comes to an end when the server leaves without answering.
    abandoned: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// What the request holds.
    _account: Arc<Account>,
    started: Instant,
    /// Of the first prompt, tokens that were not computed again.
    cached: usize,
    /// Tokens of answers that have ended.
    written: usize,
    failed: bool,
}

impl Turn {
    /// How many answers there will be.
    pub fn count(&self) -> usize {
        self.tickets.len()
    }

    /// What happens next and to which answer; `None` when all have ended. After an error nothing more happens. Nothing is lost
    /// where this is not waited for to the end.
    pub async fn next(&mut self) -> Option<Result<(usize, ReplyEvent), ApiError>> {
        if self.open == 0 {
            return None;
        }
        let received = tokio::select! {
            biased;
            () = self.abandoned.as_mut() => Err(leaving()),
            () = until(self.deadline) => Err(ApiError::timeout()),
            heard = self.receiver.recv() => match heard {
                Some((index, event)) => event.map(|event| (index, event)),
                None => Err(ApiError::internal("computing failed; the server's log says why")),
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
            _ => "left by its client",
        };
        let seconds = self.started.elapsed().as_secs_f64();
        let Turn { prompt_tokens, cached, written, .. } = self;
        let rate = if seconds > 0.0 { *written as f64 / seconds } else { 0.0 };
        tracing::info!(
            "{outcome} in {seconds:.1} s: prompt {prompt_tokens} tokens ({cached} cached), {written} written, {rate:.1} tok/s"
        );
    }
}

/// Passes on what happens to an answer, and counts it.
struct Hearer {
    index: usize,
    sender: UnboundedSender<(usize, Result<ReplyEvent, ApiError>)>,
    meters: Arc<Meters>,
    /// Tokens of the prompt that have been computed.
    read: usize,
    /// `None` when the answer has ended.
    place: Option<OpenPlace>,
}

impl Hearer {
    fn hear(&mut self, event: Result<ReplyEvent, Error>) {
        let event = event.map_err(ApiError::from);
        match &event {
            Ok(ReplyEvent::Progress { done, .. }) => {
                // A request that had to make room for others reads its prompt again.
                self.meters.read(done.saturating_sub(self.read));
                self.read = *done;
            }
            // Whoever hears of the end can be sure that there is room again.
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
        // Where nobody listens any more, the answer is cancelled.
        let _ = self.sender.send((self.index, event));
    }
}
