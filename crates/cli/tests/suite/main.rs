//! Tests that run the program. One program, since every program more is linked with all of it.

#[path = "../common/mod.rs"]
mod common;

mod advice;
mod batch;
mod bench;
mod book;
mod chat;
mod config;
mod devices;
mod docs;
mod doctor;
mod errors;
mod files;
mod perplexity;
mod pull;
mod run;
mod screens;
mod serve;
mod serve_apis;
mod serve_errors;
mod serve_forms;
mod serve_life;
mod serve_page;
mod signals;
mod stages;
mod streaming;
mod synth;
mod trace;
