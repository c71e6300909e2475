// Makes docs/page.png: the page after the demo model has told a story, and the panel with the map of its experts.
//
// Everything in the picture is real: the text, the figures and the experts are those of this run. The experts get half of
// the memory that they need, so the server streams the others from the drive. `run` beside this file says how to call it.

import { statSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';
import { serve } from './server.js';

const { values: options } = parseArgs({
  options: {
    forebay: { type: 'string' },
    chromium: { type: 'string' },
    out: { type: 'string', default: fileURLToPath(new URL('../../docs/page.png', import.meta.url)) },
    // The page's files from this folder instead of the program's.
    page: { type: 'string' },
  },
});

/** Conversations for the list at the side; the last one is in the picture. Its seed gives a complete story. */
const STORIES = [
  ['Tell me a story about the moon.', 1],
  ['Tell me a story about a fish and a boat.', 1],
  ['Tell me a story about a red balloon.', 19],
  ['Tell me a story about a dragon.', 20],
];

const server = await serve(options.forebay, '--expert-memory', '50%', '--heat', 'off', '--prefix-cache', 'off');
const browser = await chromium.launch({ executablePath: options.chromium, args: ['--no-sandbox', '--disable-gpu'] });
const page = await browser.newPage({ viewport: { width: 1320, height: 820 }, colorScheme: 'light' });
await page.goto(server.origin);
await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
for (const [story, seed] of STORIES) {
  await page.click('[data-action=new]');
  await page.click('main .bar [data-action=settings]');
  await page.fill('#settings [name=seed]', String(seed));
  await page.click('#settings .strong');
  await page.fill('#words', story);
  await page.press('#words', 'Enter');
  await page.waitForSelector('.answer footer');
}
// The panel shows the last tokens of the story.
await page.waitForTimeout(150);
await page.screenshot({ path: options.out });
await browser.close();
await server.stop();
console.log(`${options.out}: ${(statSync(options.out).size / 1024).toFixed(0)} KiB`);
