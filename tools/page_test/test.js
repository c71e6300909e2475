// Tests the page in a real Chromium, with a real server and the demo model. `run` in this folder calls it.

import assert from 'node:assert/strict';
import { mkdirSync, readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';
import { HOSTILE, TEXTS } from './texts.js';
import { serve } from './server.js';

const { values: options } = parseArgs({
  options: {
    forebay: { type: 'string' },
    chromium: { type: 'string' },
    shots: { type: 'string' },
    // Takes the page's files from this folder instead of the binary, to work on them without compiling.
    page: { type: 'string' },
    // Only the promises whose name contains this.
    only: { type: 'string', default: '' },
  },
});
if (options.shots) mkdirSync(options.shots, { recursive: true });

const DESKTOP = { width: 1440, height: 900 };
const PHONE = { width: 390, height: 844 };

// Few expert slots, so that experts move.
const server = await serve(options.forebay, '--memory', '400M', '--expert-memory', '50%', '--heat', 'off');
const locked = await serve(options.forebay, '--api-key', 'sesame');
const browser = await chromium.launch({ executablePath: options.chromium, args: ['--no-sandbox', '--disable-gpu'] });
let failed = 0;

/** One promise of the page's. Whatever happens, nothing may be asked of others and nothing may go wrong unnoticed. */
async function promise(name, body, { origin = server.origin, expected = [], ...settings } = {}) {
  if (!name.includes(options.only)) return;
  const context = await browser.newContext({ viewport: DESKTOP, ...settings });
  const page = await context.newPage();
  const wrong = [];
  // The test itself reads the canvas repeatedly.
  expected = [...expected, 'willReadFrequently'];
  page.on('console', (message) => {
    const text = message.text();
    if (['error', 'warning'].includes(message.type()) && !expected.some((words) => text.includes(words))) wrong.push(`console: ${text}`);
  });
  page.on('pageerror', (error) => wrong.push(`error: ${error.message}`));
  page.on('dialog', (dialog) => {
    wrong.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  context.on('request', (request) => {
    if (!request.url().startsWith(`${origin}/`) && !request.url().startsWith(`blob:${origin}/`)) wrong.push(`request to ${request.url()}`);
  });
  page.setDefaultTimeout(20_000);
  if (options.page) {
    await context.route((url) => url.pathname === '/' || url.pathname.startsWith('/page/'), async (route) => {
      const { pathname } = new URL(route.request().url());
      const body = readFileSync(`${options.page}/${pathname === '/' ? 'index.html' : pathname.slice('/page/'.length)}`);
      await route.fulfill({ response: await route.fetch(), body });
    });
  }
  const start = performance.now();
  try {
    await page.goto(`${origin}/`);
    await page.waitForFunction(() => document.querySelector('#machine').dataset.open !== undefined);
    await body(page, context);
    assert.deepEqual(wrong, []);
    console.log(`ok   ${name} (${((performance.now() - start) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed++;
    console.log(`FAIL ${name}\n${error.stack ?? error}\n${wrong.join('\n')}`);
    if (options.shots) await page.screenshot({ path: `${options.shots}/failed.png` }).catch(() => {});
  }
  await context.close();
}

async function shot(page, name) {
  if (options.shots) await page.screenshot({ path: `${options.shots}/${name}.png` });
}

async function say(page, text) {
  await page.fill('#words', text);
  await page.press('#words', 'Enter');
}

const answered = (page) => page.waitForSelector('.answer:last-child footer');
const lastAnswer = (page) => page.locator('.answer .prose').last().innerText();

/** Sets the most tokens and a seed, through the dialog. */
async function choose(page, settings) {
  await page.click('main .bar [data-action=settings]');
  for (const [name, value] of Object.entries(settings)) await page.fill(`#settings [name=${name}]`, String(value));
  await page.click('#settings .strong');
}

/** Lets the model "say" this. */
async function pretend(page, text, pieces = 7) {
  await page.route('**/v1/chat/completions', (route) => {
    const chunk = (delta, finish = null) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: finish }] })}\n\n`;
    let body = chunk({ role: 'assistant' });
    for (let at = 0; at < text.length; at += pieces) body += chunk({ content: text.slice(at, at + pieces) });
    route.fulfill({ contentType: 'text/event-stream', body: `${body}${chunk({}, 'stop')}data: [DONE]\n\n` });
  });
}

/** Lets the model "say" these chunks, each so many milliseconds after the one before. */
async function pretendSlowly(page, chunks) {
  await page.evaluate((chunks) => {
    const real = window.fetch;
    window.fetch = (path, options) => {
      if (path !== '/v1/chat/completions') return real(path, options);
      const body = new ReadableStream({
        async start(stream) {
          for (const [pause, chunk] of chunks) {
            await new Promise((resolve) => setTimeout(resolve, pause));
            stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify({ choices: [], ...chunk })}\n\n`));
          }
          stream.enqueue(new TextEncoder().encode('data: [DONE]\n\n'));
          stream.close();
        },
      });
      return Promise.resolve(new Response(body));
    };
  }, chunks);
}

/** What a canvas shows: how many pixels of each colour, and all of them in a number. */
const painted = (page) => page.$eval('#machine canvas', (canvas) => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Map();
  let sum = 0;
  for (let i = 0; i < data.length; i += 4) {
    const colour = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
    if (data[i + 3] === 255) colours.set(colour, (colours.get(colour) ?? 0) + 1);
    sum = (sum * 31 + colour) >>> 0;
  }
  return { colours: [...colours.values()].filter((count) => count > 20).length, sum };
});

const noSideways = async (page) => {
  const [page_, column, box] = await page.evaluate(() => {
    const scroll = document.getElementById('scroll');
    return [document.documentElement.scrollWidth, scroll.scrollWidth - scroll.clientWidth, innerWidth];
  });
  assert.ok(page_ <= box, `the page is ${page_} wide, the window ${box}`);
  assert.ok(column <= 0, `the conversation is ${column} too wide`);
};

await promise('an answer streams, and is measured', async (page) => {
  await page.waitForFunction(() => document.querySelector('#name').textContent.startsWith('tales-'));
  await choose(page, { max_tokens: 150, seed: 1 });
  await page.evaluate(() => {
    window.lengths = new Set();
    const messages = document.querySelector('#messages');
    const note = () => window.lengths.add(messages.querySelector('.answer .prose')?.textContent.length ?? 0);
    new MutationObserver(note).observe(messages, { childList: true, subtree: true, characterData: true });
  });
  await say(page, 'Tell me a tale about a lighthouse.');
  await page.waitForSelector('#stop:not([hidden])');
  await page.waitForSelector('#stop', { state: 'hidden' });
  await answered(page);
  const steps = await page.evaluate(() => window.lengths.size);
  assert.ok(steps > 3, `text grew in ${steps} steps`);
  assert.match(await page.locator('.answer footer').innerText(), /tok\/s · \d+ tokens · prompt: \d+ tokens in .* expert cache hit rate \d+%/);
  assert.equal(await page.title(), 'Tell me a tale about a lighthouse. · Forebay');
});

await promise('an answer can be stopped, and written again', async (page) => {
  await choose(page, { temperature: 1.2 });
  await say(page, 'Tell me a very long tale.');
  await page.waitForFunction(() => document.querySelector('.answer .prose')?.innerText.length > 20);
  await page.keyboard.press('Escape');
  await answered(page);
  assert.match(await page.locator('.answer footer').innerText(), /stopped/);
  const stopped = await lastAnswer(page);
  assert.ok(stopped.length > 20);
  await page.waitForFunction(() => document.querySelector('[data-part=requests]').textContent === 'Idle');
  await choose(page, { max_tokens: 24, seed: 7 });
  await page.click('.answer [data-do=again]');
  await page.waitForSelector('#stop', { state: 'hidden' });
  await answered(page);
  assert.equal(await page.locator('.answer').count(), 1);
  assert.notEqual(await lastAnswer(page), stopped);
});

await promise('a message can be edited, which drops what came after it', async (page) => {
  await choose(page, { max_tokens: 12, seed: 3 });
  for (const words of ['First question?', 'Second question?']) {
    await say(page, words);
    await answered(page);
    await page.waitForSelector('#stop', { state: 'hidden' });
  }
  assert.equal(await page.locator('article').count(), 4);
  await page.locator('.user').first().hover();
  await page.locator('.user [data-do=edit]').first().click();
  assert.equal(await page.inputValue('#words'), 'First question?');
  await say(page, 'Another question?');
  await page.waitForSelector('#stop', { state: 'hidden' });
  await answered(page);
  assert.equal(await page.locator('article').count(), 2);
  assert.equal(await page.locator('.said').innerText(), 'Another question?');
  // Without a mouse: the arrow recalls the last message, Escape cancels that.
  await page.press('#words', 'ArrowUp');
  assert.equal(await page.inputValue('#words'), 'Another question?');
  await page.keyboard.press('Escape');
  assert.equal(await page.inputValue('#words'), '');
});

await promise('conversations outlive a reload; they are renamed, exported, deleted and brought back', async (page) => {
  await choose(page, { max_tokens: 16, seed: 5, system: 'You tell tales.' });
  await say(page, 'A tale, please.');
  await answered(page);
  const text = await lastAnswer(page);
  await page.reload();
  await answered(page);
  assert.equal(await lastAnswer(page), text);
  assert.equal(await page.locator('.said').innerText(), 'A tale, please.');
  assert.match(await page.locator('#chosen').innerText(), /system prompt.*max tokens 16, seed 5/);

  await page.hover('#list li');
  await page.click('#list [data-row=rename]');
  await page.keyboard.type('My tale');
  await page.keyboard.press('Enter');
  assert.equal(await page.locator('#title').innerText(), 'My tale');
  const waiting = page.waitForEvent('download');
  await page.click('#list [data-row=export]');
  const download = await waiting;
  assert.equal(download.suggestedFilename(), 'My-tale.json');
  const chunks = [];
  for await (const chunk of await download.createReadStream()) chunks.push(chunk);
  const exported = JSON.parse(Buffer.concat(chunks).toString());
  assert.deepEqual(exported.messages.map(({ role }) => role), ['user', 'assistant']);
  assert.equal(exported.settings.system, 'You tell tales.');

  await page.click('#list [data-row=delete]');
  assert.equal(await page.locator('#list li').count(), 0);
  assert.equal(await page.locator('article').count(), 0);
  await page.click('#toast button');
  assert.equal(await page.locator('#title').innerText(), 'My tale');
  await page.reload();
  await answered(page);
  assert.equal(await page.locator('#list .open').innerText(), 'My tale');
});

await promise('nothing that a model writes is executed or fetched', async (page) => {
  await page.addInitScript(() => { window.hacked = 0; });
  await page.reload();
  await pretend(page, HOSTILE, 3);
  await say(page, 'Be evil.');
  await answered(page);
  await page.waitForTimeout(300);
  assert.equal(await page.evaluate(() => window.hacked), 0);
  const found = await page.$eval('.answer .prose', (prose) => ({
    tags: [...new Set([...prose.querySelectorAll('*')].map((node) => node.localName))],
    handlers: [...prose.querySelectorAll('*')].flatMap((node) => node.getAttributeNames()).filter((name) => name.startsWith('on')),
    links: [...prose.querySelectorAll('a')].map((link) => [link.protocol, link.rel, link.target].join(' ')),
    text: prose.innerText,
  }));
  const allowed = 'a blockquote br button code del div em h3 h4 h5 h6 hr input li ol p pre span strong table tbody td th thead tr ul';
  for (const tag of found.tags) assert.ok(allowed.split(' ').includes(tag), `<${tag}> was made`);
  assert.deepEqual(found.handlers, []);
  for (const link of found.links) assert.match(link, /^(https?|mailto): noopener noreferrer _blank$/);
  for (const words of ['<img src=x onerror=', '<script>', 'javascript:', '<iframe', '<svg onload']) {
    assert.ok(found.text.includes(words), `${words} is not shown as text`);
  }
});

await promise('Markdown cut anywhere gives what it gives whole, and long texts take long, not forever', async (page) => {
  const report = await page.evaluate(async (texts) => {
    const { Markdown, render } = await import('/page/markdown.js');
    const html = (fill) => {
      const root = document.createElement('div');
      fill(root);
      root.normalize();
      return root.innerHTML;
    };
    const wrong = [];
    for (const { text, holds } of texts) {
      const whole = html((root) => render(root, text));
      for (const some of holds) if (!whole.includes(some)) wrong.push(`${JSON.stringify(text)} gives ${whole}, without ${some}`);
      for (const size of [1, 2, 3, 5, 11]) {
        const cut = html((root) => {
          const markdown = new Markdown(root);
          for (let at = 0; at < text.length; at += size) markdown.push(text.slice(at, at + size));
          markdown.finish();
        });
        if (cut !== whole) wrong.push(`in pieces of ${size}: ${cut}\nwhole: ${whole}`);
      }
    }
    // Measures long texts in small pieces, and texts four times as long.
    const time = (text) => {
      const start = performance.now();
      const markdown = new Markdown(document.createElement('div'));
      for (let at = 0; at < text.length; at += 40) markdown.push(text.slice(at, at + 40));
      markdown.finish();
      return performance.now() - start;
    };
    const paragraphs = 'A paragraph of *some* words and `code`, as models write them.\n\n- one\n- two\n\n';
    const line = 'let line = "of code";\n';
    const times = [[paragraphs, 150], ['```\n', line, 2000]].map(([head, ...more]) => {
      const text = (times) => (more.length === 1 ? head.repeat(more[0] * times) : head + more[0].repeat(more[1] * times));
      return [time(text(1)), time(text(1)), time(text(4))];
    });
    // Texts that make a careless parser backtrack: marks that are never closed.
    const nasty = ['*'.repeat(20000), '[' .repeat(20000), '`a'.repeat(10000), '> '.repeat(5000), '**a '.repeat(8000), '_a*b~~'.repeat(4000), '|'.repeat(9000) + '\n' + '|-'.repeat(9000), '  '.repeat(40) + '- '.repeat(3000), '!['.repeat(8000) + '](x'.repeat(8000)];
    const slow = nasty.map((text) => {
      const start = performance.now();
      render(document.createElement('div'), text);
      return performance.now() - start;
    });
    return { wrong, times, slow };
  }, TEXTS);
  assert.deepEqual(report.wrong, []);
  for (const [, once, four] of report.times) assert.ok(four < 12 * once + 200, `${once} ms, and four times as much ${four} ms`);
  assert.ok(Math.max(...report.slow) < 3000, `${report.slow}`);
});

await promise('failures are sentences that say what to do', async (page) => {
  const notice = () => page.locator('.answer:last-child .notice').innerText();
  for (const [status, message, words] of [
    [400, 'the temperature is wrong', /The temperature is wrong\. Check the settings/],
    [429, '64 requests wait', /64 requests wait\. Retry in 5 seconds\./],
    [500, '', /status 500\. The server's log/],
  ]) {
    await page.route('**/v1/chat/completions', (route) => route.fulfill({
      status, headers: { 'retry-after': '5' }, contentType: 'application/json', body: message && JSON.stringify({ error: { message } }),
    }), { times: 1 });
    await say(page, `Fail with ${status}.`);
    await page.waitForSelector('.answer:last-child .notice');
    assert.match(await notice(), words);
    await page.click('[data-action=new]');
  }
  await page.route('**/v1/chat/completions', (route) => route.abort(), { times: 1 });
  await say(page, 'Are you there?');
  await page.waitForSelector('.answer:last-child .notice');
  assert.match(await notice(), /does not answer\. Check that forebay serve/);
  await page.route('**/v1/chat/completions', (route) => route.fulfill({
    contentType: 'text/event-stream', body: 'data: {"choices":[{"index":0,"delta":{"content":"Half an ans"}}]}\n\n',
  }), { times: 1 });
  await page.click('.answer .notice [data-do=again]');
  await page.waitForFunction(() => /connection ended.*so far is kept/.test(document.querySelector('.answer .notice')?.innerText));
  assert.equal(await lastAnswer(page), 'Half an ans');
  // The real server answers this time, to the same message.
  await choose(page, { max_tokens: 12 });
  await page.click('.answer .notice [data-do=again]');
  await page.waitForFunction(() => document.querySelector('.answer footer')?.innerText.includes('tok/s'));
  assert.equal(await page.locator('.notice.error:visible').count(), 0);
  assert.equal(await page.locator('article').count(), 2);
  assert.equal(await page.locator('.said').innerText(), 'Are you there?');
}, { expected: ['Failed to load resource'] });

await promise('reasoning is apart, and the prompt\'s progress is shown', async (page) => {
  const chunk = (delta, more = {}) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }], ...more })}\n\n`;
  await page.route('**/v1/chat/completions', (route) => {
    const body = route.request().postDataJSON();
    assert.equal(body.return_progress, true);
    assert.deepEqual(body.chat_template_kwargs, { enable_thinking: true, thinking: true });
    route.fulfill({ contentType: 'text/event-stream', body: chunk({}, { prompt_progress: { processed: 512, total: 2048, seconds_left: 3 } })
      + chunk({ reasoning_content: 'Let me <b>think</b>.' }) + chunk({ content: 'Done **thinking**.' }) + 'data: [DONE]\n\n' });
  });
  await page.click('main .bar [data-action=settings]');
  await page.check('#settings [name=think][value=on]');
  await page.click('#settings .strong');
  await say(page, 'Think.');
  await answered(page);
  assert.equal(await lastAnswer(page), 'Done thinking.');
  assert.equal(await page.locator('details').getAttribute('open'), null);
  await page.locator('summary').press('Enter');
  assert.equal(await page.locator('.thoughts').innerText(), 'Let me <b>think</b>.');
});

await promise('a long prompt shows its progress in per cent, and the time that is left', async (page) => {
  await pretendSlowly(page, [
    [0, { prompt_progress: { processed: 0, total: 4096, seconds_left: null } }],
    [1000, { prompt_progress: { processed: 1024, total: 4096, seconds_left: 252.6 } }],
    [1000, { choices: [{ index: 0, delta: { content: 'Read.' }, finish_reason: 'stop' }] }],
  ]);
  await say(page, 'A long prompt.');
  await page.waitForFunction(() => document.querySelector('.answer .status')?.innerText === 'Processing the prompt: 0% of 4,096 tokens');
  await page.waitForFunction(() => /^Processing the prompt: 25% of 4,096 tokens, about 4 min left$/.test(document.querySelector('.answer .status')?.innerText));
  assert.equal(await page.locator('.answer progress').evaluate((bar) => bar.value / bar.max), 0.25);
  await answered(page);
  assert.equal(await lastAnswer(page), 'Read.');
});

await promise('a message that is sent while the model loads is answered when it is loaded', async (page) => {
  await page.waitForFunction(() => document.querySelector('#name').textContent.startsWith('tales-'));
  let loaded = 0.42;
  await page.route('**/health', (route) => route.fulfill({ json: loaded < 1 ? { status: 'ok', state: 'loading', loaded, needs_key: false } : { status: 'ok', state: 'ready', needs_key: false } }));
  await page.reload();
  await page.waitForFunction(() => document.querySelector('#banner').innerText.startsWith('Loading the model… 42%.'));
  await choose(page, { max_tokens: 12 });
  await say(page, 'Good morning.');
  await page.waitForFunction(() => document.querySelector('.answer .status')?.innerText === 'Waiting for the model to load…');
  loaded = 0.9;
  await page.waitForFunction(() => document.querySelector('#banner').innerText.startsWith('Loading the model… 90%.'));
  loaded = 1;
  await answered(page);
  assert.ok((await lastAnswer(page)).length > 5);
  assert.equal(await page.isVisible('#banner'), false);
  await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
});

await promise('the page asks for a key before the first message, and loses nothing that was typed', async (page) => {
  await page.waitForSelector('#key[open]');
  await page.click('#key [data-action=close-key]');
  assert.match(await page.locator('#banner').innerText(), /needs an API key/);
  await choose(page, { max_tokens: 12 });
  await say(page, 'Open, please.');
  await page.waitForSelector('#key[open]');
  assert.equal(await page.inputValue('#words'), 'Open, please.');
  await page.fill('#key input', 'abracadabra');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#refused:not([hidden])');
  await page.fill('#key input', 'sesame');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#key', { state: 'hidden' });
  await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
  assert.equal(await page.inputValue('#words'), '', 'it was sent with the right key');
  await answered(page);
  assert.equal(await page.locator('.said').innerText(), 'Open, please.');
  assert.equal(await page.isVisible('#banner'), false);
}, { origin: locked.origin, expected: ['401'] });

const fragile = await serve(options.forebay);
await promise('the page says that the server is gone, keeps the message, and reconnects by itself', async (page) => {
  await choose(page, { max_tokens: 12 });
  await page.fill('#words', 'Half a mess');
  await page.reload();
  assert.equal(await page.inputValue('#words'), 'Half a mess');
  await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
  await fragile.stop();
  await page.waitForFunction(() => /does not answer.*Reconnecting/.test(document.querySelector('#banner').innerText));
  await say(page, 'Still there?');
  await page.waitForSelector('.answer .notice');
  assert.equal(await page.locator('.said').innerText(), 'Still there?');
  const again = await serve(options.forebay, '--port', new URL(fragile.origin).port);
  await page.waitForSelector('#banner', { state: 'hidden' });
  await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
  await page.click('.answer .notice [data-do=again]');
  await answered(page);
  assert.ok((await lastAnswer(page)).length > 5);
  assert.equal(await page.locator('article').count(), 2);
  await again.stop();
}, { origin: fragile.origin, expected: ['Failed to load resource', 'ERR_'] });

const small = await serve(options.forebay, '--ctx', '256');
await promise('when the context fills, the page warns, and drops the oldest turns on request', async (page) => {
  const send = async (words, tokens) => {
    await choose(page, { max_tokens: tokens });
    await say(page, words);
    await page.waitForSelector('#stop', { state: 'hidden' });
    await answered(page);
  };
  await choose(page, { temperature: 0 });
  await send('Tell me a tale about a fox.', 90);
  assert.equal(await page.isVisible('#context'), false);
  await send('Tell me a tale about a bear.', 90);
  assert.match(await page.locator('#context').innerText(), /^The context is (8|9)\d% full: 2\d\d of 256 tokens\./);
  await page.click('#context [data-action=drop]');
  assert.equal(await page.isVisible('#context'), false);
  assert.match(await page.locator('.dropped').innerText(), /no longer sees the turns above/);
  assert.equal(await page.locator('article').count(), 4, 'nothing is gone from the screen');
  // A message that does not fit with what is there: not sent in part, and no dead end.
  await say(page, `Tell me of ${'a fox and a bear and '.repeat(22)}a hare.`);
  await page.waitForSelector('.answer:last-child .notice');
  assert.match(await page.locator('.answer:last-child .notice').innerText(), /maximum context length is 256 tokens/);
  const request = page.waitForRequest('**/v1/chat/completions');
  await page.click('.notice [data-do=drop]');
  const { messages } = (await request).postDataJSON();
  assert.equal(messages.length, 1, 'all turns but the last are dropped');
  await page.waitForFunction(() => document.querySelector('.answer:last-child footer')?.innerText.includes('tok/s'));
  await page.reload();
  await answered(page);
  assert.equal(await page.locator('.dropped').count(), 1, 'it is remembered');
  // One that does not fit at all can only be made shorter.
  await page.click('[data-action=new]');
  await say(page, 'word '.repeat(400));
  await page.waitForSelector('.answer:last-child .notice');
  assert.match(await page.locator('.answer:last-child .notice').innerText(), /Shorten the message/);
  assert.equal(await page.locator('.notice [data-do=drop]').count(), 0);
  await page.click('.notice [data-do=edit-last]');
  assert.match(await page.inputValue('#words'), /^word word/);
}, { origin: small.origin, expected: ['400'] });

await promise('the heat map is painted, and moves with the work', async (page) => {
  await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
  const before = await painted(page);
  assert.ok(before.colours >= 2, `${before.colours} colours`);
  assert.match(await page.locator('[data-part=resident]').innerText(), /^\d+ of \d+ experts in memory$/);
  assert.match(await page.locator('[data-part=memory-now]').innerText(), /MiB|GiB/);
  await choose(page, { max_tokens: 200 });
  await say(page, 'Tell me a tale about a river and a mill.');
  await page.waitForFunction(() => document.querySelector('[data-part=requests]').textContent.includes('1 running'));
  await page.waitForTimeout(600);
  const during = await painted(page);
  assert.notEqual(during.sum, before.sum);
  assert.ok(during.colours > before.colours, `${during.colours} colours`);
  await page.waitForFunction(() => Number(document.querySelector('[data-part=writing-now]').textContent) > 1);
  await page.waitForFunction(() => Number(document.querySelector('[data-part=hit-now]').textContent) > 1);
  // A closed picture causes no work.
  await page.click('#machine [data-action=machine]');
  assert.equal(await page.isVisible('#machine'), false);
});

await promise('any model fits the map, and every expert has its place', async (page) => {
  const wrong = await page.evaluate(async () => {
    const { HeatMap } = await import('/page/heatmap.js');
    const wrong = [];
    for (const width of [280, 340, 412]) {
      for (const [layers, experts] of [[4, 16], [1, 8], [24, 32], [48, 128], [58, 256], [61, 384], [94, 512], [200, 64]]) {
        const box = document.createElement('div');
        box.style.width = `${width}px`;
        const canvas = document.createElement('canvas');
        for (const [name, colour] of Object.entries({ absent: '#ffffff', resident: '#000000', arriving: '#888888', hit: '#0000ff', missed: '#ff0000' })) {
          canvas.style.setProperty(`--${name}`, colour);
        }
        box.append(canvas);
        document.body.append(box);
        const map = new HeatMap(canvas);
        map.shape(Array.from({ length: layers }, (_, layer) => [layer, experts, 2]));
        const name = `${layers} × ${experts} in ${width}`;
        if (canvas.clientWidth > width) wrong.push(`${name}: ${canvas.clientWidth} wide`);
        if (canvas.clientHeight > 760) wrong.push(`${name}: ${canvas.clientHeight} tall`);
        const left = 26 * devicePixelRatio;
        const black = () => {
          const { data } = canvas.getContext('2d').getImageData(left, 0, canvas.width - left, canvas.height);
          const found = [];
          for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255 && data[i] === 0) found.push(i / 4);
          return found;
        };
        for (const expert of [0, experts - 1, experts * layers - 1, Math.floor(experts * layers / 2)]) {
          const skip = (n) => [...Array(Math.floor(n / 255)).fill(255), n % 255];
          map.apply(Uint8Array.from([...skip(expert), 2]));
          const found = black();
          if (found.length === 0) wrong.push(`${name}: expert ${expert} is not to be seen`);
          const at = found[0] ?? 0;
          const words = map.describe((left + (at % (canvas.width - left)) + 0.5) / devicePixelRatio, (Math.floor(at / (canvas.width - left)) + 0.5) / devicePixelRatio);
          const expected = `Layer ${Math.floor(expert / experts)}, expert ${expert % experts}: in memory`;
          if (words !== expected) wrong.push(`${name}: ${words}, not ${expected}`);
          map.apply(Uint8Array.from([...skip(expert), 0]));
        }
        box.remove();
      }
    }
    return wrong;
  });
  assert.deepEqual(wrong, []);
});

const TALE = TEXTS.find(({ name }) => name === 'everything').text;

for (const [name, colorScheme] of [['desktop-light', 'light'], ['desktop-dark', 'dark']]) {
  await promise(`the page on a desk, ${colorScheme}`, async (page) => {
    await pretend(page, TALE);
    await say(page, 'How much water waits before the turbines, and what is it good for?');
    await answered(page);
    await page.unroute('**/v1/chat/completions');
    await page.evaluate(() => { document.querySelector('#scroll').scrollTop = 0; });
    // Another client's request, which the picture shows.
    const work = fetch(`${server.origin}/v1/chat/completions`, { method: 'POST', body: JSON.stringify({ messages: [{ role: 'user', content: 'A tale, please.' }], max_tokens: 400 }) });
    await page.waitForFunction(() => document.querySelector('[data-part=requests]').textContent.includes('running'));
    await page.waitForTimeout(1500);
    await noSideways(page);
    await shot(page, name);
    await (await work).text();
  }, { colorScheme });
}

await promise('the page on a phone has no sideways scroll, and its panels open over it', async (page) => {
  await pretend(page, TALE);
  await say(page, 'How much water waits before the turbines, and what is it good for?');
  await answered(page);
  await noSideways(page);
  await shot(page, 'phone');
  assert.equal(await page.isVisible('#conversations'), false);
  await page.click('main [data-action=conversations]');
  assert.ok(await page.isVisible('#conversations'));
  await page.keyboard.press('Escape');
  assert.equal(await page.isVisible('#conversations'), false);
  assert.equal(await page.evaluate(() => document.activeElement.dataset.action), 'conversations');
  await page.click('main [data-action=machine]');
  await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
  assert.ok((await painted(page)).colours >= 2);
  await noSideways(page);
  await shot(page, 'phone-machine');
  await page.click('#shade', { position: { x: 5, y: 400 } });
  assert.equal(await page.isVisible('#machine'), false);
}, { viewport: PHONE, hasTouch: true, isMobile: true, deviceScaleFactor: 2 });

await promise('everything is reached with the keyboard, and has a name', async (page) => {
  const nameless = await page.evaluate(() => [...document.querySelectorAll(':is(button, input, textarea, canvas):not([hidden])')]
    .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length || node.title))
    .map((node) => node.outerHTML));
  assert.deepEqual(nameless, []);
  const reached = new Set();
  for (let i = 0; i < 25; i++) {
    await page.keyboard.press('Tab');
    reached.add(await page.evaluate(() => document.activeElement.dataset.action ?? document.activeElement.id));
  }
  for (const name of ['new', 'settings', 'machine', 'words']) assert.ok(reached.has(name), `${name} is not reached`);
});

// An open picture does not keep the server from leaving.
await promise('the server leaves while the page is watched', async (page) => {
  await page.waitForFunction(() => document.querySelector('#machine').dataset.live === 'true');
  const start = performance.now();
  assert.equal(await server.stop(), 0);
  assert.ok(performance.now() - start < 10_000);
}, { expected: ['Failed to load resource', 'ERR_'] });

await browser.close();
console.log(failed === 0 ? 'all promises hold' : `${failed} failed`);
process.exit(failed === 0 ? 0 : 1);
