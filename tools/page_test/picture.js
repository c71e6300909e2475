// Makes docs/page.png: the page with a story of the demo model, while the server generates another one. The panel shows the
// map of the experts.
//
// Everything in the picture is real: the text, the figures and the experts are those of this run. The memory budget is too
// small for all experts, so the server streams some of them from the drive. `run` beside this file says how to call it.

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

/** The conversation in the picture: this seed gives a complete story. */
const STORY = ['Tell me a story about a dragon.', 20];
/** The other conversations of the list. The last one is being answered in the picture. */
const OTHERS = ['The fish and the boat', 'A red balloon', 'Why is the sky blue?', 'A day at the sea', 'The old tree', 'A poem for my cat'];
const NOW = 'The moon and the little bear';

const server = await serve(options.forebay, '--memory', '58M', '--parallel', '2', '--queue', '2', '--heat', 'off', '--prefix-cache', 'off');
const browser = await chromium.launch({ executablePath: options.chromium, args: ['--no-sandbox', '--disable-gpu'] });
const page = await browser.newPage({ viewport: { width: 1320, height: 800 }, colorScheme: 'light' });

async function begin(words, seed = '') {
  await page.click('[data-action=new]');
  await page.click('main .bar [data-action=settings]');
  await page.fill('#settings [name=seed]', String(seed));
  await page.click('#settings .strong');
  const chosen = seed === '' ? 'Default settings' : `seed ${seed}`;
  await page.waitForFunction((chosen) => document.querySelector('#chosen').textContent === chosen, chosen);
  await page.fill('#words', words);
  await page.press('#words', 'Enter');
}

await page.goto(server.origin);
await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
for (const words of OTHERS) {
  await begin(words);
  await page.waitForSelector('.answer footer');
  // The curves show some time, and pauses.
  await page.waitForTimeout(1500);
}
await begin(...STORY);
await page.waitForSelector('.answer footer');
await begin(NOW);
await page.click(`#list button[title="${STORY[0]}"]`);
await page.waitForFunction(() => document.querySelector('[data-part=requests]').textContent === '1 running');
await page.focus('#words');
await page.mouse.move(600, 600);
await page.waitForTimeout(60);
await page.screenshot({ path: options.out });
await browser.close();
await server.stop();
console.log(`${options.out}: ${(statSync(options.out).size / 1024).toFixed(0)} KiB`);
