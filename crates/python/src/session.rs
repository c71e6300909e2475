//! A conversation in tokens.

use std::ffi::{CStr, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_engine::{Cancel, Error, Result, TokenId};
use pyo3::exceptions::{PyBufferError, PyIndexError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::exception;
use crate::model::Core;
use crate::waiting::wait;

/// A conversation in tokens.
///
/// A session keeps what it has computed, so that longer texts with the same beginning take only the time of the rest.
/// Model.session() makes one.
///
/// >>> import forebay
/// >>> llm = forebay.Model()
/// >>> session = llm.session()
/// >>> session.extend(llm.tokenizer.encode("The cat sat on the"))
/// (0, 5)
/// >>> session.extend(llm.tokenizer.encode("The cat sat on the mat"))
/// (5, 1)
/// >>> len(session), len(session.logits) == llm.vocab_size
/// (6, True)
#[pyclass(frozen, module = "forebay")]
pub struct Session {
    model: Arc<Core>,
    held: Arc<Held>,
}

/// The session itself, which a thread that computes holds, too.
pub struct Held {
    /// `None` after the session was closed.
    session: Mutex<Option<forebay_engine::Session>>,
    /// How often calls were cancelled. A call ends when this is no longer what it was at its start.
    cancelled: Arc<AtomicU64>,
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, Option<forebay_engine::Session>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the calls in progress.
    fn cancel(&self) {
        self.cancelled.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the calls in progress, and gives the memory back.
    pub fn close(&self) {
        self.cancel();
        self.lock().take();
    }
}

impl Session {
    /// A session of a model.
    ///
    /// # Errors
    /// If the model is closed.
    pub fn of(model: &Arc<Core>, session: forebay_engine::Session) -> PyResult<Session> {
        let held = Arc::new(Held { session: Mutex::new(Some(session)), cancelled: Arc::default() });
        model.adopt(&held)?;
        Ok(Session { model: Arc::clone(model), held })
    }

    /// Does something with the session on another thread.
    fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut forebay_engine::Session) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        // Checks that the model is open, in this process.
        self.model.engine()?;
        let held = Arc::clone(&self.held);
        let (count, start) = (Arc::clone(&held.cancelled), held.cancelled.load(Ordering::Relaxed));
        // Each call has its own, so that one that nobody waits for any more does not end later ones.
        let cancel = Cancel::when(move || count.load(Ordering::Relaxed) != start);
        let work = {
            let cancel = cancel.clone();
            move || {
                let mut held = held.lock();
                let session = held.as_mut().ok_or_else(|| Error::Invalid("the session is closed".into()))?;
                session.obey(&cancel);
                cancel.check()?;
                work(session)
            }
        };
        wait(py, &cancel, work)?.map_err(exception)
    }

    /// Reads something from the session, which takes no time unless the session computes.
    fn read<T: Send + 'static>(
        &self,
        py: Python<'_>,
        read: impl FnOnce(&forebay_engine::Session) -> T + Send + 'static,
    ) -> PyResult<T> {
        if let Ok(held) = self.held.session.try_lock()
            && let Some(session) = &*held
        {
            return Ok(read(session));
        }
        self.run(py, move |session| Ok(read(session)))
    }
}

fn ids(tokens: Vec<u32>) -> Vec<TokenId> {
    tokens.into_iter().map(TokenId).collect()
}

#[pymethods]
impl Session {
    /// Makes the session hold exactly these tokens, and computes those after the longest beginning that it already holds.
    ///
    /// Returns how many tokens the session already held, and how many were computed.
    fn extend(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<(usize, usize)> {
        let extended = self.run(py, move |session| session.extend(&ids(tokens)))?;
        Ok((extended.reused, extended.computed))
    }

    /// Appends one token.
    fn push(&self, py: Python<'_>, token: u32) -> PyResult<()> {
        self.run(py, move |session| session.push(TokenId(token)))
    }

    /// The tokens.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.read(py, |session| session.tokens().iter().map(|token| token.0).collect())
    }

    /// The logits after the last token, as they are now. Empty before the first token.
    #[getter]
    fn logits(&self, py: Python<'_>) -> PyResult<Logits> {
        self.read(py, |session| Logits::of(session.logits()))
    }

    /// A second session with the same tokens, which goes its own way. Both share what was computed so far.
    fn fork(&self, py: Python<'_>) -> PyResult<Session> {
        Session::of(&self.model, self.run(py, forebay_engine::Session::fork)?)
    }

    /// Writes the session to a file, for Model.load_session.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.run(py, move |session| session.save(&path))
    }

    /// Ends the calls that compute on other threads, with the exception Cancelled. The session stays usable.
    fn cancel(&self) {
        self.held.cancel();
    }

    /// Gives the memory of the session back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.cancel();
        let held = Arc::clone(&self.held);
        wait(py, &Cancel::default(), move || held.close())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |session| session.tokens().len())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _exception: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }
}

/// The logits after a token: a read-only array of float32.
///
/// It has the buffer protocol, so memoryview(logits) and numpy.asarray(logits) share its memory.
///
/// >>> import forebay
/// >>> llm = forebay.Model()
/// >>> session = llm.session()
/// >>> _ = session.extend(llm.tokenizer.encode("Once upon a"))
/// >>> best = max(range(llm.vocab_size), key=session.logits.__getitem__)
/// >>> llm.tokenizer.decode([best])
/// ' time'
#[pyclass(frozen, sequence, module = "forebay")]
pub struct Logits {
    /// `[vocab]`
    values: Box<[f32]>,
    /// For views: the number of values, and the bytes from one to the next.
    shape: [isize; 1],
    strides: [isize; 1],
}

/// The format of a value in views.
const FORMAT: &CStr = c"f";

impl Logits {
    fn of(values: &[f32]) -> Logits {
        Logits { values: values.into(), shape: [values.len() as isize], strides: [size_of::<f32>() as isize] }
    }
}

#[pymethods]
impl Logits {
    fn __len__(&self) -> usize {
        self.values.len()
    }

    fn __getitem__(&self, index: isize) -> PyResult<f32> {
        let from_start = if index < 0 { index + self.shape[0] } else { index };
        let value = usize::try_from(from_start).ok().and_then(|index| self.values.get(index));
        value.copied().ok_or_else(|| PyIndexError::new_err(format!("there is no logit {index}")))
    }

    fn __repr__(&self) -> String {
        format!("<forebay.Logits of {} tokens>", self.values.len())
    }

    // SAFETY: Python passes a view that may be written to, and calls this with the interpreter's lock held.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            // SAFETY: as above.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(PyBufferError::new_err("logits are read-only"));
        }
        let asked = |flag: c_int| flags & flag == flag;
        let logits = slf.get();
        // SAFETY: as above. The view keeps the object alive, and the object never changes or moves its values. Nobody
        // writes through the pointers of a view that is read-only.
        unsafe {
            let view = &mut *view;
            view.buf = logits.values.as_ptr().cast_mut().cast();
            view.len = size_of_val(&*logits.values) as isize;
            view.itemsize = size_of::<f32>() as isize;
            view.readonly = 1;
            view.ndim = 1;
            view.format =
                if asked(ffi::PyBUF_FORMAT) { FORMAT.as_ptr().cast_mut() } else { std::ptr::null_mut() };
            view.shape =
                if asked(ffi::PyBUF_ND) { logits.shape.as_ptr().cast_mut() } else { std::ptr::null_mut() };
            view.strides = if asked(ffi::PyBUF_STRIDES) {
                logits.strides.as_ptr().cast_mut()
            } else {
                std::ptr::null_mut()
            };
            view.suboffsets = std::ptr::null_mut();
            view.internal = std::ptr::null_mut();
            view.obj = slf.into_any().into_ptr();
        }
        Ok(())
    }
}
