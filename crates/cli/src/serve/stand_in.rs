//! Stands in for dialects until they are there.
#![allow(dead_code)]

use forebay_engine::Result;

pub enum Piece<'a> {
    Reasoning(&'a str),
    Content(&'a str),
    Call { name: &'a str },
    Arguments(&'a str),
}

#[derive(Clone)]
pub struct Dialect;
pub struct Parser(crate::chat::thinking::Splitter);

impl Dialect {
    pub fn of(_: &str) -> Dialect {
        Dialect
    }
    pub fn parser(&self, prompt: &str, _: &[serde_json::Value]) -> Parser {
        Parser(crate::chat::thinking::Splitter::after(prompt))
    }
    pub fn call_grammar(&self, _: &str, _: &[serde_json::Value]) -> Result<String> {
        Err(forebay_engine::Error::Unsupported("not yet".into()))
    }
}

impl Parser {
    pub fn push(&mut self, text: &str, emit: &mut dyn FnMut(Piece<'_>)) {
        self.0.push(text, &mut |kind, text| match kind {
            crate::chat::thinking::Kind::Reasoning => emit(Piece::Reasoning(text)),
            crate::chat::thinking::Kind::Answer => emit(Piece::Content(text)),
        });
    }
    pub fn finish(self, emit: &mut dyn FnMut(Piece<'_>)) {
        self.0.finish(&mut |kind, text| match kind {
            crate::chat::thinking::Kind::Reasoning => emit(Piece::Reasoning(text)),
            crate::chat::thinking::Kind::Answer => emit(Piece::Content(text)),
        });
    }
}
