-- Carries out settlements of one member, each only if it still owns the entry and nobody took it since.
-- KEYS: stream, due, tries, dead letters, wake. ARGV: group, member, time in ms for which dead letters are kept, whether to wake members (1),
-- operations of 8:
-- kind, id, count, delay, attempt, trials, meta, payload ("+..." or "" for none).
-- Kinds: A ack, R retry or release, D dead letter, T trial. Answers: 1 done, 0 not owned, 2 the entry is gone, or an error text.
local stream, due, tries, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, me = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local out = {}
local soonest

local function carry(kind, id, count, delay, attempt, trials, meta, payload)
  local held = redis.call('XPENDING', stream, group, id, id, 1)[1]
  if not held or held[2] ~= me or held[4] ~= count then
    return 0
  end
  if kind == 'A' then
    redis.call('XACK', stream, group, id)
    redis.call('HDEL', tries, id)
  elseif kind == 'R' then
    local left = redis.call('XCLAIM', stream, group, '~parked', 0, id, 'RETRYCOUNT', math.max(count - 1, 0), 'JUSTID')
    if not left[1] then
      redis.call('HDEL', tries, id)
      return 2
    end
    redis.call('ZADD', due, now + delay, id)
    soonest = math.min(soonest or delay, delay)
    if attempt == '1' and trials == '0' then
      redis.call('HDEL', tries, id)
    else
      redis.call('HSET', tries, id, attempt .. ':' .. trials)
    end
  elseif kind == 'D' then
    local add = {'XADD', dead, 'MINID', '~', string.format('%.0f', now - ARGV[3]), '*', 'mq', meta}
    if payload ~= '' then
      add[#add + 1] = 'p'
      add[#add + 1] = string.sub(payload, 2)
    end
    local done = redis.pcall(unpack(add))
    if type(done) == 'table' and done.err then
      return done.err
    end
    redis.call('XACK', stream, group, id)
    redis.call('HDEL', tries, id)
  elseif kind == 'T' then
    redis.call('HSET', tries, id, attempt .. ':' .. trials)
  end
  return 1
end

local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]
for i = 5, #ARGV, 8 do
  out[#out + 1] = carry(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5],
    ARGV[i + 6], ARGV[i + 7])
end
-- Later than what is known already wakes nobody.
if soonest and ARGV[4] == '1' and (soonest == 0 or not first or now + soonest < tonumber(first)) then
  redis.call('SET', KEYS[5], '1')
end
return out
