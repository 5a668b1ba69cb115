//! Owns `cotenant explain`: what the running agent says has happened, in words.
//! Refuses to judge again: the words are the agent's.
//!
//! Exits with 0 when the agent has answered, 1 when it could not be asked, 2 when the question makes no sense.

mod quota;

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use cotenant_model::explain::Explanation;
use serde::Deserialize;

use crate::client::{AskError, Place, quoted};

const UNASKED: u8 = 1;
const SENSELESS: u8 = 2;

#[derive(Args, Debug)]
pub(crate) struct Question {
    /// How far back to look, such as 15m or 2h
    #[arg(long, value_name = "DURATION", default_value = "15m", value_parser = duration)]
    since: String,
    /// Only what concerns this tenant, by its name in the metrics
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Instead of incidents: how much memory each tenant needs, why, and which MIG profile would hold it
    #[arg(long, conflicts_with = "since")]
    quota: bool,
    /// Words, or the agent's JSON as it came
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

/// As it was written, once it can be read: the agent reads it again.
fn duration(text: &str) -> Result<String, String> {
    humantime::parse_duration(text)
        .map(|_| text.to_owned())
        .map_err(|error| format!("{error}; write a duration such as 15m or 2h"))
}

/// The answer, as far as it is read here.
#[derive(Deserialize)]
struct Answer {
    incidents: Vec<Told>,
}

#[derive(Deserialize)]
struct Told {
    explanation: Explanation,
}

pub(crate) fn run(question: &Question) -> ExitCode {
    let answered = ask(question).and_then(|(address, text)| {
        let told = match question.output {
            Output::Json => return Ok(text),
            Output::Text if question.quota => quota::words(&text, question.tenant.as_deref()),
            Output::Text => words(&text, &question.since),
        };
        told.map_err(|source| AskError::Malformed { address, source })
    });
    match answered {
        Ok(text) => {
            println!("{}", text.trim_end());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cotenant: {}", crate::discovery::chain(&error));
            ExitCode::from(if matches!(error, AskError::Refused { .. }) { SENSELESS } else { UNASKED })
        }
    }
}

/// Where the answer came from, and the answer.
fn ask(question: &Question) -> Result<(String, String), AskError> {
    let address = question.place.address()?;
    let target = if question.quota {
        "/api/v1/risk".to_owned()
    } else {
        let mut target = format!("/api/v1/incidents?since={}", quoted(&question.since));
        if let Some(tenant) = &question.tenant {
            target = format!("{target}&tenant={}", quoted(tenant));
        }
        target
    };
    let text = question.place.ask(&address, &target)?;
    Ok((address, text))
}

/// Newest last: that is where a terminal's reader is.
fn words(text: &str, since: &str) -> Result<String, serde_json::Error> {
    let answer: Answer = serde_json::from_str(text)?;
    if answer.incidents.is_empty() {
        return Ok(format!("no incidents in the last {since}"));
    }
    let told: Vec<String> = answer.incidents.iter().rev().map(|told| told.explanation.to_string()).collect();
    Ok(told.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_that_make_no_sense_are_told_what_would() {
        assert_eq!(duration("15m").as_deref(), Ok("15m"));
        assert!(duration("15").unwrap_err().contains("such as 15m"));
    }

    #[test]
    fn the_newest_incident_is_the_last_one() {
        let one = |headline: &str| {
            format!(
                "{{\"id\":\"1-1\",\"explanation\":{{\"headline\":\"{headline}\",\"measured\":[],\"because\":[],\"advice\":[\"Go.\"]}}}}"
            )
        };
        let text = format!("{{\"incidents\":[{},{}]}}", one("second"), one("first"));
        let words = words(&text, "15m").expect("an answer");
        assert_eq!(words, "first\n\nWhat to do:\n  - Go.\n\nsecond\n\nWhat to do:\n  - Go.\n");
        assert_eq!(
            super::words("{\"incidents\":[]}", "2h").expect("an answer"),
            "no incidents in the last 2h"
        );
        assert!(super::words("{}", "2h").is_err());
    }
}
