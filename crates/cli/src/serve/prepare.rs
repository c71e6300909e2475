//! From what is asked to what is computed.

use std::sync::Arc;

use forebay_engine::{ChatRequest, Client};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::app::{App, Loaded, leaving};
use super::error::ApiError;
use super::memory::{Account, busy};
use super::turn::Turn;
use crate::openai::answer::Form;
use crate::openai::{Body, Endpoint, drop_volatile_lines};

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
            app.limit(client, &mut request.options);
            loaded.check_template()?;
            drop_volatile_lines(&mut request.messages)?;
            let question = loaded.prompter().chat(request)?;
            app.queue(loaded, &[question], 1)
        })
        .await
    }

    /// How many tokens the prompt of a request has.
    pub async fn count_tokens(
        self: &Arc<App>,
        read: impl FnOnce(&Loaded) -> Result<ChatRequest, ApiError> + Send + 'static,
    ) -> Result<usize, ApiError> {
        self.prepare(move |_, loaded| {
            let mut request = read(loaded)?;
            request.check()?;
            loaded.check_template()?;
            drop_volatile_lines(&mut request.messages)?;
            Ok(loaded.prompter().prompt(&request)?.tokens.len())
        })
        .await
    }

    /// [`turn`](Self::turn) for what is asked in OpenAI's words, and what the answers look like.
    pub async fn turn_of_body(
        self: &Arc<App>,
        client: Client,
        endpoint: Endpoint,
        body: Body,
    ) -> Result<(Turn, Form), ApiError> {
        self.prepare(move |app, loaded| {
            if endpoint == Endpoint::Chat {
                loaded.check_template()?;
            }
            let limit = |options: &mut _| app.limit(client, options);
            let (questions, form) = body.questions(endpoint, loaded.prompter(), limit)?;
            Ok((app.queue(loaded, &questions, form.each)?, form))
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
