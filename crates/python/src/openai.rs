//! Answers in the form of OpenAI's API.

use std::sync::{Mutex, PoisonError};
use std::task::Poll;

use forebay_server::openai::Answers;
use pyo3::prelude::*;

use crate::errors::exception;
use crate::waiting::LOOK;

/// The answers to a body of OpenAI's API, as JSON texts. Dropping it cancels what is not answered.
#[pyclass(frozen, module = "forebay._native")]
pub struct OpenAi(Mutex<Option<Answers>>);

impl OpenAi {
    /// From the server's.
    pub fn of(answers: Answers) -> OpenAi {
        OpenAi(Mutex::new(Some(answers)))
    }

    fn poll(&self) -> Poll<Option<forebay_engine::Result<String>>> {
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(answers) = &mut *answers else { return Poll::Ready(None) };
        answers.next_within(LOOK).map(|item| item.map(|item| item.map(|value| value.to_string())))
    }
}

#[pymethods]
impl OpenAi {
    /// Waits for the next object; None at the end.
    fn next(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            match py.detach(|| self.poll()) {
                Poll::Ready(item) => return item.transpose().map_err(exception),
                Poll::Pending => py.check_signals().inspect_err(|_| self.close(py))?,
            }
        }
    }

    /// Cancels what is not answered.
    fn close(&self, py: Python<'_>) {
        // Another thread may wait for an object, for a moment.
        py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
