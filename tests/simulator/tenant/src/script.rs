//! Owns the script: lines to steps, blocks in braces, sizes with suffixes.
//! Refuses what it cannot read, with the line.

use cotenant_abi::Operation;

#[derive(Debug)]
pub(crate) struct StepError {
    pub(crate) line: usize,
    pub(crate) reason: String,
}

#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) line: usize,
    pub(crate) word: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) block: Vec<Step>,
}

impl Step {
    pub(crate) fn optional(&self, index: usize) -> Option<&str> {
        self.arguments.get(index).map(String::as_str)
    }

    pub(crate) fn text(&self, index: usize) -> Result<&str, String> {
        self.optional(index).ok_or_else(|| format!("{} wants at least {} arguments", self.word, index + 1))
    }

    pub(crate) fn number(&self, index: usize) -> Result<u64, String> {
        let text = self.text(index)?;
        text.parse().map_err(|_| format!("{text:?} is not a number"))
    }

    pub(crate) fn bytes(&self, index: usize) -> Result<u64, String> {
        bytes(self.text(index)?)
    }
}

fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = [("KiB", 10), ("MiB", 20), ("GiB", 30)]
        .iter()
        .find_map(|(suffix, shift)| Some((text.strip_suffix(suffix)?, *shift)))
        .unwrap_or((text, 0));
    let count: u64 =
        digits.parse().map_err(|_| format!("{text:?} is not a size; 4096, 64KiB, 2MiB, 30GiB are"))?;
    count.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is too large"))
}

pub(crate) fn operation(name: &str) -> Result<u8, String> {
    Operation::ALL
        .iter()
        .find(|operation| operation.as_str() == name)
        .map(|operation| *operation as u8)
        .ok_or_else(|| format!("{name:?} is not an operation; cuMemAlloc and cuMemFreeAsync are"))
}

pub(crate) fn parse(text: &str) -> Result<Vec<Step>, StepError> {
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    let steps = block(&mut lines, 0)?;
    Ok(steps)
}

fn block<'a>(
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
    opened: usize,
) -> Result<Vec<Step>, StepError> {
    let mut steps = Vec::new();
    while let Some((line, text)) = lines.next() {
        let text = text.split('#').next().unwrap_or_default().trim();
        if text.is_empty() {
            continue;
        }
        if text == "}" {
            return if opened == 0 {
                Err(StepError { line, reason: "a closing brace without an opening one".to_owned() })
            } else {
                Ok(steps)
            };
        }
        let (text, opens) = text.strip_suffix('{').map_or((text, false), |rest| (rest, true));
        let mut words = text.split_whitespace().map(str::to_owned);
        let Some(word) = words.next() else {
            return Err(StepError { line, reason: "a block wants a step before its brace".to_owned() });
        };
        let arguments = words.collect();
        let block = if opens { block(lines, line)? } else { Vec::new() };
        steps.push(Step { line, word, arguments, block });
    }
    if opened == 0 {
        Ok(steps)
    } else {
        Err(StepError {
            line: opened,
            reason: "this block is not closed; a line with } alone closes it".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_nest_and_comments_are_nothing() {
        let steps =
            parse("init # first\nloop 3 {\n  alloc a 2MiB\n  loop 2 {\n free a\n }\n}\n").expect("parsed");
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[1].block[1].block[0].word, "free");
        assert_eq!(steps[1].block[0].bytes(1), Ok(2 << 20));
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_its_line() {
        assert_eq!(parse("init\nloop 2 {\nfree a\n").expect_err("open block").line, 2);
        assert_eq!(parse("init\n}\n").expect_err("stray brace").line, 2);
        assert!(bytes("2MB").is_err());
        assert!(operation("cuLaunchKernel").is_err());
    }
}
