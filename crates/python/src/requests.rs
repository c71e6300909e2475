//! Requests for answers.

use forebay_engine::conversation::Format;
use forebay_engine::{Error, Grammar, Prompter, Question, Result};
use forebay_server::openai::{Body, Endpoint};
use serde_json::Value;

/// What is asked of a model: a body of OpenAI's API, and what that cannot say.
pub struct Asked {
    endpoint: Endpoint,
    body: Value,
    /// A Lark grammar of the answer.
    grammar: Option<String>,
}

impl Asked {
    /// A request whose body is JSON text.
    ///
    /// # Errors
    /// If it is not JSON.
    pub fn read(endpoint: Endpoint, body: &str, grammar: Option<String>) -> Result<Asked> {
        Ok(Asked { endpoint, body: json(body)?, grammar })
    }

    /// The questions for the model: one in a chat, and one for each prompt otherwise.
    ///
    /// # Errors
    /// If a field is wrong, which [`Error::Field`] names, or does not fit the context or the memory.
    pub fn questions(self, prompter: &Prompter) -> Result<Vec<Question>> {
        let grammar = self.grammar.map(|source| Grammar::lark(prompter.engine(), &source));
        let grammar = grammar.transpose().map_err(|error| Error::about("grammar", error))?;
        let adjust = |options: &mut forebay_engine::conversation::ReplyOptions| {
            if let Some(grammar) = grammar {
                options.format = Format::Grammar(grammar);
            }
        };
        let (questions, _) = Body::read(self.body)?.questions(self.endpoint, prompter, adjust)?;
        Ok(questions)
    }
}

/// Reads JSON text.
///
/// # Errors
/// If it is not JSON.
pub fn json(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::Invalid(format!("the request is not JSON: {error}")))
}
