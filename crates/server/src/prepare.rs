//! Converts a request to questions for the engine.

use std::sync::Arc;

use forebay_engine::{ChatRequest, Client};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use crate::app::{App, Loaded, leaving};
use crate::error::ApiError;
use crate::memory::{Account, busy};
use crate::openai::answer::Form;
use crate::openai::{Body, Endpoint, drop_volatile_lines};
use crate::turn::Turn;

impl App {
    /// Parses and checks a request, renders and tokenises its prompt, and queues it. An invalid request fails here, before anything is
    /// sent.
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

    /// Counts the prompt tokens of a request.
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

    /// [`turn`](Self::turn) for a body of OpenAI's API, and the form of its answers.
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

    /// Runs longer work on another thread, until the request's time limit or the end of the server. Other requests are served
    /// meanwhile.
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
            // Templates get copies of the messages.
            let copies = account.lend_when_free(&loaded.memory, account.preparing()).await?;
            let result = aside({
                let app = Arc::clone(&app);
                move || {
                    let _copies = copies;
                    account.within(|| work(&app, &loaded))
                }
            });
            // The memory may suffice when other requests have ended.
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

/// Threads for longer work.
pub const ASIDE_THREADS: usize = 4;

/// The free ones of these threads.
static FREE_THREADS: Semaphore = Semaphore::const_new(ASIDE_THREADS);

/// Runs longer work on another thread. If the caller is dropped before a thread is free, the work is dropped too.
pub async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let thread = FREE_THREADS.acquire().await;
    let task = tokio::task::spawn_blocking(move || {
        let _thread = thread;
        work()
    });
    task.await
        .unwrap_or_else(|_| Err(ApiError::internal("preparing the request failed: see the server's log")))
}

/// Completes at this time, or never without one.
pub async fn until(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}
