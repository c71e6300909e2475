//! A model's tokenizer.

use std::sync::Arc;

use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Cancel, Engine, TokenId};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::exception;
use crate::model::Core;
use crate::waiting::wait;

/// Longer texts are encoded on another thread, so that Ctrl-C ends the wait.
const LONG: usize = 256 << 10;

/// Converts text to tokens and back.
///
/// >>> import forebay
/// >>> tokenizer = forebay.Model().tokenizer
/// >>> tokens = tokenizer.encode("Once upon a time")
/// >>> len(tokens), tokenizer.decode(tokens)
/// (4, 'Once upon a time')
#[pyclass(frozen, module = "forebay")]
pub struct Tokenizer(Arc<Core>);

impl Tokenizer {
    /// The tokenizer of a model.
    pub fn of(model: &Arc<Core>) -> Tokenizer {
        Tokenizer(Arc::clone(model))
    }

    fn engine(&self) -> PyResult<Engine> {
        self.0.engine()
    }
}

#[pymethods]
impl Tokenizer {
    /// Converts a text to tokens.
    ///
    /// If `special` is true, the text of a control token, such as `<|im_end|>`, becomes that token; otherwise it is plain text.
    /// `bos` says whether the tokens start with the model's token for that; None means as the model's file says.
    #[pyo3(signature = (text, *, special=false, bos=None))]
    fn encode(&self, py: Python<'_>, text: String, special: bool, bos: Option<bool>) -> PyResult<Vec<u32>> {
        let engine = self.engine()?;
        let bos = match bos {
            None => Bos::AsFileSays,
            Some(true) => Bos::Always,
            Some(false) => Bos::Never,
        };
        let long = text.len() > LONG;
        let encode = move || engine.tokenizer().encode(&text, EncodeOptions { special, bos });
        let tokens = if long { wait(py, &Cancel::default(), encode)? } else { py.detach(encode) };
        Ok(tokens.map_err(exception)?.into_iter().map(|token| token.0).collect())
    }

    /// Converts tokens to text. If `special` is true, control tokens have their text, otherwise none.
    #[pyo3(signature = (tokens, *, special=false))]
    fn decode(&self, py: Python<'_>, tokens: Vec<u32>, special: bool) -> PyResult<String> {
        let engine = self.engine()?;
        let tokens: Vec<TokenId> = tokens.into_iter().map(TokenId).collect();
        Ok(py.detach(move || engine.tokenizer().decode(&tokens, special)))
    }

    /// The bytes of a token, which may be a part of a character. An unknown token has none.
    fn token_bytes<'py>(&self, py: Python<'py>, token: u32) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.engine()?.tokenizer().token_bytes(TokenId(token))))
    }

    /// The token with exactly this text, or None.
    fn find(&self, text: &str) -> PyResult<Option<u32>> {
        Ok(self.engine()?.tokenizer().find(text).map(|token| token.0))
    }

    /// Whether a token is not text.
    fn is_control(&self, token: u32) -> PyResult<bool> {
        Ok(self.engine()?.tokenizer().is_control(TokenId(token)))
    }

    /// The number of tokens. A model may have more logits, padded to a round number.
    #[getter]
    fn vocab_size(&self) -> PyResult<usize> {
        Ok(self.engine()?.tokenizer().vocab_size())
    }

    /// The token that starts a text, or None.
    #[getter]
    fn bos(&self) -> PyResult<Option<u32>> {
        Ok(self.engine()?.tokenizer().bos().map(|token| token.0))
    }

    /// The token that ends a text, or None.
    #[getter]
    fn eos(&self) -> PyResult<Option<u32>> {
        Ok(self.engine()?.tokenizer().eos().map(|token| token.0))
    }

    /// All tokens that end an answer.
    #[getter]
    fn end_tokens(&self) -> PyResult<Vec<u32>> {
        Ok(self.engine()?.tokenizer().end_tokens().iter().map(|token| token.0).collect())
    }

    fn __len__(&self) -> PyResult<usize> {
        self.vocab_size()
    }
}
